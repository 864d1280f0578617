"""``data.pkl`` in a file of ``torch.save``: it describes the objects, and each tensor names the storage that has its bytes."""

from __future__ import annotations

import collections
import functools
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import torch_compat as compat
from .safetensors_format import NAMES

_TYPED = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
}


@dataclass(frozen=True)
class StoredAs:
    """A contiguous tensor that is all of the storage named ``key``."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorPickler(pickle.Pickler):
    """Writes each object for which ``stored_as`` returns a description as a tensor."""

    def __init__(self, file: io.BytesIO, stored_as: Callable[[Any], StoredAs | None]) -> None:
        super().__init__(file, protocol=2)
        self._stored_as = stored_as

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, StoredAs):
            return None
        numel = math.prod(obj.shape)
        typed = _TYPED.get(obj.dtype)
        if typed is None:
            return ("storage", torch.UntypedStorage, obj.key, "cpu", numel * obj.dtype.itemsize)
        return ("storage", typed, obj.key, "cpu", numel)

    def reducer_override(self, obj: Any) -> Any:
        stored = self._stored_as(obj)
        if stored is None:
            return NotImplemented
        stride = tuple(math.prod(max(size, 1) for size in stored.shape[dim + 1 :]) for dim in range(len(stored.shape)))
        arguments: tuple[Any, ...] = (stored, 0, stored.shape, stride, False, collections.OrderedDict())
        if stored.dtype in _TYPED:
            return compat.REBUILD_TENSOR, arguments
        return compat.REBUILD_TENSOR_OF_DTYPE, (*arguments, stored.dtype)


def described(tensor: Tensor) -> bytes | None:
    """``description_of`` a contiguous tensor; None if that would lose a part of it."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return description_of(tensor.dtype, tuple(tensor.shape)) if plain else None


@functools.lru_cache(maxsize=10_000)
def description_of(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes | None:
    """The ``data.pkl`` of a contiguous tensor alone, whose storage is "0"; None if a file could not be read back."""
    if dtype not in NAMES:
        return None
    file = io.BytesIO()
    TensorPickler(file, lambda obj: StoredAs("0", dtype, shape) if obj is Ellipsis else None).dump(...)
    return file.getvalue()
