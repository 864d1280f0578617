"""Readers of the checkpoints that people have: FSDP1's, FSDP2's, DeepSpeed's, plain ``torch.save``, safetensors."""

from .flat_params import write_shapes
from .opened import open_source
from .source import Source

__all__ = ["Source", "open_source", "write_shapes"]
