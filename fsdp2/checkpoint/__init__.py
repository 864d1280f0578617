"""Checkpoints: from files of other programs into sharded models, and back.

    fsdp2.checkpoint.load_safetensors(model, "llama-8b")     # each rank reads its own shards
    checkpointer = fsdp2.checkpoint.Checkpointer("runs/a", model, optimizer)
    checkpointer.save(step)                                  # a thread writes while training goes on
    fsdp2.checkpoint.save_safetensors(model, "out")          # a folder that from_pretrained opens

docs/checkpoint.md is the guide.
"""

# Which file has what:
#
# Checkpointer         checkpointer, checkpointer_load, checkpoint_folder (and its lock), host_memory, end_notes, training_state
# save_safetensors     safetensors_save, safetensors_plan (what goes where), gather_to_writers, folder_commit, transformers_save
# load_safetensors     safetensors_load, safetensors_files (headers, indices); key_map, which both have
# full_state_dict      full_state, over gather_to_writers
# DCP's files          dcp_read (without running them), dcp_write
# torch.save's files   torch_file, inert_pickle
# tensors              model_tensors (a model's), lazy_tensors (not read yet); shard_geometry (elements), file_reading (bytes)
# all of these         digests (comparing bytes), failures (how errors are worded, on every rank), progress
# conversion           open_source over a reader for each format; convert and its targets, verify, load_checkpoint

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .checkpointer import Checkpointer, Resumed
from .digests import Verified
from .full_state import full_optimizer_state_dict, full_state_dict, save_full_state
from .key_map import Concat, KeyMap, KeyRule, Rename, Split, Stack, Transpose, Unstack
from .safetensors_load import LoadReport, Mismatch, load_safetensors
from .safetensors_save import SavedCheckpoint, save_safetensors

if TYPE_CHECKING:
    from .conversion.convert import Converted, convert
    from .conversion.load_checkpoint import load_checkpoint
    from .conversion.open_source import open_source
    from .conversion.rank_files import write_shapes
    from .conversion.source import Source
    from .conversion.verify import verify

_CONVERSION = {
    "Converted": "convert",
    "Source": "source",
    "convert": "convert",
    "load_checkpoint": "load_checkpoint",
    "open_source": "open_source",
    "verify": "verify",
    "write_shapes": "rank_files",
}

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


def __getattr__(name: str) -> Any:
    if name not in _CONVERSION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".conversion.{_CONVERSION[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
