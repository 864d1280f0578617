"""The files that transformers needs beside the weights: ``config.json``, and ``generation_config.json`` if there is one.

This file does not import transformers: a model's ``config`` writes itself.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import torch_compat as compat
from ..core.modules.sharded_class import original_class
from ..errors import ArgumentError
from ..fsdp_module import FSDPModule
from .failure import failure
from .model_tensors import WRAPPERS

NAMES = ("config", "generation_config")


def has_config(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "save_pretrained")


def config_files(model: nn.Module, dtypes: Collection[torch.dtype]) -> dict[str, bytes]:
    """Names and contents of JSON files. Collective: no.

    dtypes: of the weights; if all floating-point ones are of one, the config names it
    Raises: ArgumentError if the model has no config; CheckpointError if that refuses to be saved
    """
    if not has_config(model):
        raise ArgumentError(
            f"config=True, but {type(model).__name__} has no config with save_pretrained",
            expected="a model of transformers",
            fix="leave config out, and write what the reader needs yourself",
        )
    found: dict[str, bytes] = {}
    for name in NAMES:
        each: Any = copy.deepcopy(getattr(model, name, None))
        if not hasattr(each, "save_pretrained"):
            continue
        if name == "config":
            _describe(each, model, dtypes)
        with tempfile.TemporaryDirectory() as folder:
            try:
                each.save_pretrained(folder)
            except Exception as error:
                raise failure(
                    f"model.{name} cannot be saved: {type(error).__name__}: {error}",
                    expected="values that its save_pretrained accepts",
                    fix="mend it, or pass config=False; nothing was written",
                ) from error
            found |= {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".json"}
    return found


def _describe(config: Any, model: nn.Module, dtypes: Collection[torch.dtype]) -> None:
    """Write as transformers' own save_pretrained does: the user's class, not the sharded one, and the dtype of the weights."""
    config.architectures = [_class_of(model).__name__]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if len(floating) == 1:
        config.dtype = floating[0]


def _class_of(model: nn.Module) -> type:
    wrapped = next((module for name, module in model.named_children() if name in WRAPPERS), None)
    if wrapped is not None:
        return _class_of(wrapped)
    if isinstance(model, FSDPModule):
        return original_class(type(model))
    if isinstance(model, compat.TorchFSDPModule):
        return type(model).__bases__[1]
    return type(model)
