"""Checkpoints: Hugging Face's safetensors into sharded models, and back."""

from ..errors import CheckpointError
from .checkpointer import Checkpointer, Resumed
from .full_state import full_optimizer_state_dict, full_state_dict, save_full_state
from .key_map import Concat, KeyMap, KeyRule, Rename, Split, Stack, Transpose, Unstack
from .load import LoadReport, Mismatch, load_safetensors
from .save import SavedCheckpoint, save_safetensors

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Concat",
    "KeyMap",
    "KeyRule",
    "LoadReport",
    "Mismatch",
    "Rename",
    "Resumed",
    "SavedCheckpoint",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_safetensors",
    "save_full_state",
    "save_safetensors",
]
