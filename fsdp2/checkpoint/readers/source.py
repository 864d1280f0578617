"""The result of a reader for a checkpoint of any format: names and lazy tensors, as if nothing had been sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..failure import failure
from ..lazy import LazyTensor, Narrowed, Stored
from ..named_state import State
from .inert_pickle import Inert
from .lazy_pieces import Assembled, Flat, Signed, Strided, dtype_of

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Source:
    """A checkpoint that is opened, not read.

    format:    "safetensors", "dcp", "torch", "fsdp1" or "deepspeed"
    model:     by name, each a LazyTensor or, if it is extra state, another value
    optimizer: ``{"state": {name: {key: LazyTensor or value}}, "param_groups": [{..., "params": [names]}]}``, or None
    left_out:  what else the files have
    """

    path: Path
    format: str
    model: State
    optimizer: State | None = None
    left_out: list[str] = field(default_factory=list)


def named(value: Any, key: str) -> Any:
    """``value`` with its stored parts called ``key``, as errors of reading will say."""
    if isinstance(value, Stored):
        return replace(value, key=key)
    if isinstance(value, Assembled):
        return Assembled(value.shape, tuple((box, named(part, key)) for box, part in value.parts))
    return value


def cleaned(value: Any, where: str, left_out: list[str]) -> Any:
    """``value`` without its inert parts, whose places go into ``left_out``; None if no part is left."""
    if isinstance(value, Inert):
        left_out.append(f"{where}: {value.path}")
        return None
    if isinstance(value, dict):
        clean = {key: cleaned(each, f"{where}.{key}", left_out) for key, each in value.items()}
        return {key: each for key, each in clean.items() if each is not None or value[key] is None}
    if isinstance(value, (list, tuple)):
        return type(value)(cleaned(each, f"{where}[{index}]", left_out) for index, each in enumerate(value))
    return value


def tensors_of(state: Any, prefix: str = "") -> list[tuple[str, LazyTensor]]:
    """All lazy tensors of nested dicts and sequences, with their places joined by dots."""
    if isinstance(state, LazyTensor):
        return [(prefix, state)]
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, (list, tuple)):
        items = list(enumerate(state))
    return [found for key, each in items for found in tensors_of(each, f"{prefix}.{key}" if prefix else str(key))]


def nbytes_of(lazy: LazyTensor) -> int:
    return math.prod(lazy.shape) * dtype_of(lazy).itemsize


def place_of(lazy: LazyTensor) -> Any:
    """Equal for two lazy tensors that are the same bytes of the same files in the same shape: ties."""
    match lazy:
        case Stored():
            return str(lazy.path), lazy.entry
        case Strided():
            return place_of(lazy.span), lazy.shape, lazy.stride
        case Signed():
            return place_of(lazy.whole), lazy.bits
        case Narrowed():
            return place_of(lazy.whole), lazy.dim, lazy.start, lazy.length
        case Assembled():
            return lazy.shape, tuple((box, place_of(part)) for box, part in lazy.parts)
        case Flat():
            needed = list(lazy.needed())
            return lazy.shape, lazy.start - needed[0][0] if needed else 0, tuple(place_of(part) for _, _, part in needed)
    stored = list(lazy.stored())
    return (place_of(stored[0]), lazy.shape) if len(stored) == 1 and lazy.shape == stored[0].shape else id(lazy)


def checked_source(source: Source) -> Source:
    """``source``, if it has a model all of whose values a target can hold. Raises: CheckpointError"""
    if not tensors_of(source.model):
        raise failure(
            f"{source.path} has no tensors of a model",
            items=source.left_out[:20],
            expected="a state dict, alone or as 'model', 'state_dict', 'model_state_dict' or 'module' of a dict",
            fix="save the model's state dict under one of these names",
            file=source.path,
        )
    source.model = cleaned(source.model, "model", source.left_out)
    if source.optimizer is not None:
        source.optimizer = cleaned(source.optimizer, "optimizer", source.left_out)
    return source
