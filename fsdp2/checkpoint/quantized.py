"""Weights that were quantised: if a scale lies beside a float8 tensor, the tensor's values are not the weight's.

This file refuses to know how a scale is applied, which differs between formats.

Worked example: ``mlp.weight`` in F8_E4M3 with ``mlp.weight_scale_inv`` beside it, as DeepSeek-V3 has them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .lazy import LazyTensor, Stored
from .safetensors_format import DTYPES

Place = tuple[str, int]
"""A file, and where in it a tensor begins."""


def place_of(stored: Stored) -> Place:
    return str(stored.path), stored.entry.offset


def scales_of(tensors: Mapping[str, LazyTensor]) -> dict[Place, str]:
    """The name of the scale of each float8 tensor that has one."""
    found: dict[Place, str] = {}
    for name, lazy in tensors.items():
        stem = name.removesuffix("weight")
        candidates = (f"{name}_scale_inv", f"{name}_scale", f"{name}_scales", f"{name}.scale", f"{name}._scale", f"{stem}scale_weight")
        scale = next((each for each in candidates if each in tensors), None)
        if scale is not None:
            found |= {place_of(part): scale for part in lazy.stored() if is_float8(DTYPES.get(part.entry.dtype))}
    return found


def is_float8(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize == 1


def scale_lost(lazy: LazyTensor, dtype: torch.dtype, scales: Mapping[Place, str]) -> str | None:
    """The name of the scale without which ``lazy`` would be converted to ``dtype``, if there is one."""
    lost = (scales.get(place_of(part)) for part in lazy.stored() if DTYPES.get(part.entry.dtype) is not dtype)
    return next((scale for scale in lost if scale is not None), None)
