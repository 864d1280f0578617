"""``load_checkpoint``: reads a checkpoint of any known format straight into a sharded model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ...hangs.joint_calls import joint
from ..key_map import KeyMap, Tensors
from ..model_tensors import checked_model
from ..safetensors_load import LoadOptions, LoadReport, load_opened, share_of
from .open_source import open_source
from .source import Shapes
from .verify import verify as verify_checkpoint


@joint
def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    shapes: nn.Module | Shapes | str | os.PathLike[str] | None = None,
    key_map: KeyMap | None = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
    init_fn: Callable[[nn.Module], object] | None = None,
    device: torch.device | str | None = None,
    in_place: bool = False,
    verify: bool = False,
    progress: bool | None = None,
) -> LoadReport:
    """Load the model from any checkpoint that ``open_source`` opens: FSDP1, DCP, DeepSpeed, ``torch.save``, safetensors.

    format, shapes: of the checkpoint, see ``open_source``
    Everything else is as in ``load_safetensors``: each rank reads its own shards from the files of any rank. From a
    flat parameter it reads whole rows, even if it keeps only part of each. For the optimizer's state, convert the
    checkpoint to DCP first.

    Example:
        fsdp2.checkpoint.save_full_state(folder / "full.pt", model)
        report = fsdp2.checkpoint.load_checkpoint(model, folder / "full.pt")
    """
    checked_model(model, "load_checkpoint")
    options = LoadOptions.of("load_checkpoint", locals())

    def opened() -> tuple[Path, Tensors, int]:
        if verify:
            verify_checkpoint(path, format=format, share=share_of(model))
        source = open_source(path, format=format, shapes=shapes, with_optimizer=False)
        return source.path, source.tensors, 0

    return load_opened(model, path, opened, options)
