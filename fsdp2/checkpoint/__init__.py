"""Checkpoints: from files of other programs into sharded models, and back.

    fsdp2.checkpoint.load_safetensors(model, "llama-8b")     # each rank reads its own shards
    checkpointer = fsdp2.checkpoint.Checkpointer("runs/a", model, optimizer)
    checkpointer.save(step)                                  # a thread writes while training goes on
    fsdp2.checkpoint.save_safetensors(model, "out")          # a folder that from_pretrained opens

docs/checkpoint.md is the guide.
"""

# Which file has what:
#
# Checkpointer         checkpointer, checkpointer_load; checkpoint_folder, folder_lock, gloo_group; per_rank_values, random_state
# save_safetensors     safetensors_save, safetensors_plan (what goes where), bands (to the writers), hf_commit, hf_config,
#                      hf_pretrained (transformers' save_pretrained)
# load_safetensors     safetensors_load, hf_folder (finding files), quantized; key_map and safetensors_format, which both have
# load_checkpoint      load_any_format, over ``readers``: a reader for each format
# convert, verify      over ``readers`` and ``targets``; digests
# full_state_dict      full_state
# DCP's files          dcp_files (reading without running them), dcp_metadata_check, dcp_strided (what torch gets wrong)
# torch.save's files   torch_pickle, torch_zip, pickle_limits
# a model's tensors    model_tensors (safetensors), named_state (DCP), host_copy; lazy and lazy_model (not read yet)
# elements and bytes   boxes, byte_ranges, regular_file
# all ranks together   every_rank; failure (how errors are worded), progress

from ..errors import CheckpointError
from .checkpointer import Checkpointer, Resumed
from .convert import Converted, convert
from .full_state import full_optimizer_state_dict, full_state_dict, save_full_state
from .key_map import Concat, KeyMap, KeyRule, Rename, Split, Stack, Transpose, Unstack
from .load_any_format import load_checkpoint
from .readers import Source, open_source, write_shapes
from .safetensors_load import LoadReport, Mismatch, load_safetensors
from .safetensors_save import SavedCheckpoint, save_safetensors
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
