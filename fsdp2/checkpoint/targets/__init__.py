"""Writers of checkpoints from lazy tensors, on one process, with bounded memory: the formats that ``convert`` can write."""
