"""Checkpoints: from anything into sharded models, and back."""

from ..errors import CheckpointError
from .checkpointer import Checkpointer, Resumed
from .convert import Converted, convert
from .full_state import full_optimizer_state_dict, full_state_dict, save_full_state
from .key_map import Concat, KeyMap, KeyRule, Rename, Split, Stack, Transpose, Unstack
from .load import LoadReport, Mismatch, load_safetensors
from .load_any import load_checkpoint
from .readers import Source, open_source, write_shapes
from .save import SavedCheckpoint, save_safetensors
from .verify import Verified, verify

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Concat",
    "Converted",
    "KeyMap",
    "KeyRule",
    "LoadReport",
    "Mismatch",
    "Rename",
    "Resumed",
    "SavedCheckpoint",
    "Source",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "Verified",
    "convert",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_checkpoint",
    "load_safetensors",
    "open_source",
    "save_full_state",
    "save_safetensors",
    "verify",
    "write_shapes",
]
