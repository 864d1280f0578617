"""Weights that were quantised: if a scale lies beside a float8 tensor, the tensor's values are not the weight's.

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
    """The name of the scale of each float8 tensor that has one: programs name it in many ways, all with "scale", and in its module."""
    found: dict[Place, str] = {}
    scales: dict[str, list[str]] = {}  # by the module, or the tensor, that they are in
    for name in tensors:
        parent, _, last = name.rpartition(".")
        if "scale" in last.lower():
            scales.setdefault(parent, []).append(name)
    for name, lazy in tensors.items():
        near = [each for each in (*scales.get(name, ()), *scales.get(name.rpartition(".")[0], ())) if each != name]
        if near:
            scale = next((each for each in near if each.startswith(name)), near[0])
            found |= {place_of(part): scale for part in lazy.stored() if is_float8(DTYPES.get(part.entry.dtype))}
    return found


def is_float8(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize == 1


def scale_lost(lazy: LazyTensor, dtype: torch.dtype, scales: Mapping[Place, str]) -> str | None:
    """The name of the scale without which ``lazy`` would be converted to ``dtype``, if there is one."""
    lost = (scales.get(place_of(part)) for part in lazy.stored() if DTYPES.get(part.entry.dtype) is not dtype)
    return next((scale for scale in lost if scale is not None), None)
