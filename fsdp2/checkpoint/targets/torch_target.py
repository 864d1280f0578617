"""Write one file of ``torch.save``'s format from lazy tensors, a band at a time.

``torch.save`` itself wants all tensors in memory. The format is a zip: the description of the objects, in which a tensor names a
storage, then each storage's bytes as an entry of its own, beginning at a multiple of 64 bytes so that the file can be mapped. Tensors
that are the same bytes of the source share a storage, so that ties survive. It refuses to know checkpoints.
"""

from __future__ import annotations

import collections
import functools
import io
import math
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core import torch_compat as compat
from ..byte_ranges import bytes_of
from ..lazy import LazyTensor, Stored
from ..named_state import State
from ..readers.lazy_pieces import dtype_of
from ..readers.source import place_of
from ..safetensors_format import NAMES, Entry
from .streaming import Stream, converted

_ALIGN = 64
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


class _Storage:
    def __init__(self, key: str, lazy: LazyTensor, dtype: torch.dtype) -> None:
        self.key = key
        self.lazy = lazy
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.lazy.shape) * self.dtype.itemsize


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, dtype: torch.dtype | None, model: set[int]) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[Any, _Storage] = {}
        self._dtype = dtype
        self._model = model

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        typed = _TYPED.get(obj.dtype)
        if typed is None:
            return ("storage", torch.UntypedStorage, obj.key, "cpu", obj.nbytes)
        return ("storage", typed, obj.key, "cpu", obj.nbytes // obj.dtype.itemsize)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, LazyTensor):
            return NotImplemented
        dtype = converted(obj, self._dtype) if id(obj) in self._model else dtype_of(obj)
        storage = self.storages.setdefault((place_of(obj), dtype), _Storage(str(len(self.storages)), obj, dtype))
        stride = tuple(math.prod(max(size, 1) for size in obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        arguments: tuple[Any, ...] = (storage, 0, obj.shape, stride, False, collections.OrderedDict())
        if dtype in _TYPED:
            return compat.REBUILD_TENSOR, arguments
        return compat.REBUILD_TENSOR_OF_DTYPE, (*arguments, dtype)


def described(tensor: Tensor) -> bytes | None:
    """The ``data.pkl`` of a contiguous tensor alone, whose storage is "0"; None where that does not tell all of it."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dtype in NAMES
    return _described(tensor.dtype, tuple(tensor.shape)) if plain and not tensor.is_conj() and not tensor.is_neg() else None


@functools.lru_cache(maxsize=10_000)
def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    description = io.BytesIO()
    nbytes = math.prod(shape) * dtype.itemsize
    _Pickler(description, None, set()).dump(Stored(Path(), "", Entry(NAMES[dtype], shape, 0, nbytes)))
    return description.getvalue()


def write_torch(path: Path, state: State, model: State, stream: Stream) -> None:
    """Write ``state`` to ``path``, for ``torch.load(path, weights_only=True, mmap=True)``.

    model:  whose tensors are converted to ``stream.dtype``
    Memory: the description, and one band
    """
    description = io.BytesIO()
    pickler = _Pickler(description, stream.dtype, {id(value) for value in model.values()})
    pickler.dump(state)
    with zipfile.ZipFile(path, "x", allowZip64=True) as zipped:
        for name, data in (("data.pkl", description.getvalue()), ("byteorder", b"little")):
            zipped.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
        for storage in pickler.storages.values():
            _write_storage(zipped, storage, stream)
        zipped.writestr(zipfile.ZipInfo("archive/version"), b"3\n")


def _write_storage(zipped: zipfile.ZipFile, storage: _Storage, stream: Stream) -> None:
    info = zipfile.ZipInfo(f"archive/data/{storage.key}")
    is_large = storage.nbytes > 1 << 30
    begin = zipped.start_dir + 30 + len(info.filename) + (20 if is_large else 0) + 4
    padding = -begin % _ALIGN
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with zipped.open(info, "w", force_zip64=is_large) as file:
        for band in stream.bands(storage.lazy, storage.dtype):
            file.write(bytes_of(band))
