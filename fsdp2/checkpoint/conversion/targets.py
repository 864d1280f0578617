"""Writers of checkpoints from lazy tensors, on one process, a band at a time: the formats that ``convert`` can write.

``torch.save`` itself wants all tensors in memory; a file of its format is written entry by entry, each beginning at a multiple of 64
bytes so that the file can be mapped. Tensors that are the same bytes of the source share a storage, so that ties survive. A safetensors
folder has only the first name of tied tensors, as ``save_safetensors`` leaves it. DCP's own writer gets tensors on the meta device to
plan with, and bands, each a shard of its tensor, to write.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..dcp_read import box_of
from ..dcp_write import DigestingWriter, shard_item
from ..file_reading import ByteReader, bytes_of
from ..folder_commit import NewFile, choose_names, commit, make_folder
from ..lazy_tensors import LazyTensor, State, converted, dtype_of
from ..safetensors_plan import PlannedFile, PlannedTensor, in_files
from ..shard_geometry import Box, split
from ..torch_file import StoredAs, TensorPickler
from ..training_state import map_values

BAND_NBYTES = 64 << 20


@dataclass(frozen=True)
class Stream:
    """How tensors are read; ``advance`` is told the bytes that are done.

    dtype: what floating-point tensors of the model become; None: what they are
    """

    reader: ByteReader
    advance: Callable[[int], None]
    dtype: torch.dtype | None = None

    def bands(self, lazy: LazyTensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """All elements in order, in ``dtype``, at most BAND_NBYTES at a time; none of an empty tensor."""
        for box in bands_of(lazy.shape, dtype):
            yield self.band(lazy, box, dtype)

    def band(self, lazy: LazyTensor, box: Box, dtype: torch.dtype) -> Tensor:
        values = torch.empty(box.shape, dtype=dtype, device="cpu")
        lazy.read(box, values, self.reader)
        self.advance(values.nbytes)
        return values


def bands_of(shape: tuple[int, ...], dtype: torch.dtype, fraction: int = 1) -> Iterator[Box]:
    """Boxes of at most BAND_NBYTES / ``fraction``."""
    return split(Box.whole(shape), BAND_NBYTES // fraction // dtype.itemsize)


# --- safetensors ------------------------------------------------------------------------------------------------------------------


def write_safetensors(folder: Path, model: State, stream: Stream, max_shard_nbytes: int) -> None:
    """Write the tensors of ``model`` into a new ``folder``. Memory: one band. Raises: CheckpointError naming file and key"""
    planned: dict[Any, PlannedTensor] = {}
    for key, lazy in model.items():
        if isinstance(lazy, LazyTensor):
            planned.setdefault(lazy, PlannedTensor(lazy, key, converted(lazy, stream.dtype)))
    files = in_files(planned.values(), max_shard_nbytes, [0])
    make_folder(folder)
    names = choose_names(folder, len(files), "0" * 8)
    for index, file in enumerate(files):
        _write(NewFile(names.temporary(folder, index), file.header), file, stream)
    commit(folder, names, files, {})


def _write(new: NewFile, file: PlannedFile, stream: Stream) -> None:
    try:
        for each in file.tensors:
            for band in stream.bands(each.lazy, each.dtype):
                new.write(bytes_of(band), each.key)
        new.finish()
    finally:
        new.close()


# --- torch.save -------------------------------------------------------------------------------------------------------------------


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
        return self.found.setdefault((obj, dtype), (stored, obj))[0]


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


# --- DCP --------------------------------------------------------------------------------------------------------------------------


_COPIES = 4
"""So many bands are in memory at a time: the one before, the one being written, and copies that torch.save makes."""


class _Planner(DefaultSavePlanner):
    def __init__(self, lazy_of: dict[int, LazyTensor], stream: Stream) -> None:
        super().__init__()
        self._lazy_of = lazy_of  # by id of the tensor on the meta device
        self._stream = stream

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._in_bands(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _in_bands(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or not data.size.numel():
            return [item]
        bands = list(bands_of(tuple(data.size), data.properties.dtype, _COPIES))
        return [item] if len(bands) == 1 else [shard_item(item.index.fqn, box, data.properties, data.size) for box in bands]

    def resolve_data(self, write_item: WriteItem) -> Any:
        described = self.state_dict[write_item.index.fqn]
        lazy = self._lazy_of.get(id(described))
        if lazy is None or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        return self._stream.band(lazy, box_of(write_item.tensor_data.chunk), described.dtype)


def write_dcp(folder: Path, state: State, model: State, stream: Stream) -> None:
    """Write ``state`` into a new ``folder``, in one file and ``.metadata``.

    model:  whose tensors are converted to ``stream.dtype``
    Memory: BAND_NBYTES, four bands of a quarter of it
    """
    lazy_of: dict[int, LazyTensor] = {}
    kept: list[torch.Tensor] = []  # ids stay theirs while they live
    of_model = {id(value) for value in model.values()}

    def describe(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        dtype = converted(value, stream.dtype) if id(value) in of_model else dtype_of(value)
        described = torch.empty(value.shape, dtype=dtype, device="meta")
        kept.append(described)
        lazy_of[id(described)] = value
        return described

    writer = DigestingWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # which is how it is meant
        try:
            dcp_save(map_values(describe, state), storage_writer=writer, planner=_Planner(lazy_of, stream), no_dist=True)
        except CheckpointException as wrapped:  # not an Exception; the error inside names file and key
            raise next(iter(wrapped.failures.values()))[0] from wrapped
