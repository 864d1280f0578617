"""Write one file of ``torch.save``'s format from lazy tensors, a band at a time.

``torch.save`` itself wants all tensors in memory. The format is a zip: the description of the objects, in which a tensor names a
storage, then each storage's bytes as an entry of its own, beginning at a multiple of 64 bytes so that the file can be mapped. Tensors
that are the same bytes of the source share a storage, so that ties survive.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..byte_ranges import bytes_of
from ..lazy import LazyTensor
from ..named_state import State
from ..readers.lazy_pieces import dtype_of
from ..readers.source import place_of
from ..torch_pickle import StoredAs, TensorPickler
from .streaming import Stream, converted

_ALIGN = 64


class _Storages:
    """The storages that a state needs, one for tensors that are the same bytes of the source."""

    def __init__(self, dtype: torch.dtype | None, model: set[int]) -> None:
        self.found: dict[Any, tuple[StoredAs, LazyTensor]] = {}
        self._dtype = dtype
        self._model = model

    def stored_as(self, obj: Any) -> StoredAs | None:
        if not isinstance(obj, LazyTensor):
            return None
        dtype = converted(obj, self._dtype) if id(obj) in self._model else dtype_of(obj)
        stored = StoredAs(str(len(self.found)), dtype, obj.shape)
        return self.found.setdefault((place_of(obj), dtype), (stored, obj))[0]


def write_torch(path: Path, state: State, model: State, stream: Stream) -> None:
    """Write ``state`` to ``path``, for ``torch.load(path, weights_only=True, mmap=True)``.

    model:  whose tensors are converted to ``stream.dtype``
    Memory: the description, and one band
    """
    description = io.BytesIO()
    storages = _Storages(stream.dtype, {id(value) for value in model.values()})
    TensorPickler(description, storages.stored_as).dump(state)
    with zipfile.ZipFile(path, "x", allowZip64=True) as zipped:
        for name, data in (("data.pkl", description.getvalue()), ("byteorder", b"little")):
            zipped.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
        for stored, lazy in storages.found.values():
            _write_storage(zipped, stored, lazy, stream)
        zipped.writestr(zipfile.ZipInfo("archive/version"), b"3\n")


def _write_storage(zipped: zipfile.ZipFile, stored: StoredAs, lazy: LazyTensor, stream: Stream) -> None:
    info = zipfile.ZipInfo(f"archive/data/{stored.key}")
    is_large = math.prod(stored.shape) * stored.dtype.itemsize > 1 << 30
    begin = zipped.start_dir + 30 + len(info.filename) + (20 if is_large else 0) + 4
    padding = -begin % _ALIGN
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with zipped.open(info, "w", force_zip64=is_large) as file:
        for band in stream.bands(lazy, stored.dtype):
            file.write(bytes_of(band))
