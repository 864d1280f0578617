"""Writers of checkpoints from lazy tensors, on one process, with bounded memory: what ``convert`` can write."""
