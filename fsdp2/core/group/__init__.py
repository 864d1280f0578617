"""One parameter group: its parameters, its all-gather, its memory, its gradients and their reduction."""
