"""DCP folders, saved by any program: FSDP1, torch's FSDP2, fsdp2, or a program without shards.

Each chunk of a tensor is a ``torch.save`` of its own inside a ``.distcp`` file; it is opened when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..boxes import Box
from ..byte_ranges import ByteReader
from ..dcp_files import METADATA, read_metadata, unflatten, unpack
from ..dcp_metadata_check import box_of
from ..failure import failure, readable
from ..lazy import LazyTensor, Stored
from ..named_state import State
from ..regular_file import open_regular
from ..safetensors_format import NAMES
from ..torch_pickle import description_of
from ..torch_zip import data_behind, head_nbytes
from .lazy_pieces import Assembled, dtype_of
from .torch_file import read_torch_file, stored


@dataclass(frozen=True, eq=False)
class Chunk(LazyTensor):
    """A tensor that was saved by itself in ``length`` bytes of a file from ``offset`` on."""

    path: Path
    key: str
    dtype: torch.dtype
    shape_: tuple[int, ...]
    offset: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_

    def stored(self) -> Iterator[Stored]:
        yield stored(self.path, self.key, self.dtype, self.shape_, self.offset)

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        found = self._as_we_write(reader) or read_torch_file(self.path, self.offset, self.length)
        if not isinstance(found, LazyTensor) or found.shape != self.shape_ or dtype_of(found) is not self.dtype:
            what = f"{dtype_of(found)} {found.shape}" if isinstance(found, LazyTensor) else type(found).__name__
            raise failure(
                f"{self.path} has {what} at byte {self.offset}, where {self.key} should be",
                expected=f"{self.dtype} {self.shape_}, as {METADATA} says",
                file=self.path,
                key=self.key,
            )
        found.read(box, out, reader)

    def _as_we_write(self, reader: ByteReader) -> Stored | None:
        """The stored bytes without opening the file, which costs more than a small tensor: its head is ``DigestingWriter``'s."""
        description = description_of(self.dtype, self.shape_)
        nbytes = math.prod(self.shape_) * self.dtype.itemsize
        if description is None or head_nbytes(description, nbytes) + nbytes > self.length:
            return None
        start = reader.content(self.path, self.key, self.offset, head_nbytes(description, nbytes))
        if not data_behind(start, description, nbytes):
            return None
        return stored(self.path, self.key, self.dtype, self.shape_, self.offset + len(start))


def read_dcp(folder: Path) -> State:
    """The nested state of a folder that ``dcp.save`` wrote, its tensors lazy. Raises: CheckpointError"""
    metadata = read_metadata(folder)
    if any(getattr(info, "transform_descriptors", None) for info in (metadata.storage_data or {}).values()):
        raise failure(
            f"{folder} is compressed", expected="files without extensions", fix="load it with DCP, and save it without", file=folder
        )
    chunks = DcpChunks(folder, metadata)
    return unflatten({key: chunks.value(key) for key in metadata.state_dict_metadata}, metadata)


class DcpChunks:
    """Where the values of a folder's keys lie."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata
        self._infos = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}

    def value(self, key: str) -> Any:
        """A tensor is lazy. Raises: CheckpointError, as all methods do"""
        if isinstance(self._metadata.state_dict_metadata[key], TensorStorageMetadata):
            return self._tensor(key)
        info = self._info(key)
        return read_torch_file(self._folder / info.relative_path, info.offset, info.length)

    def read(self, key: str, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Fill ``out`` with ``box`` of a tensor."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.properties.dtype in NAMES:
            self._tensor(key).read(box, out, reader)
            return
        for place in map(box_of, entry.chunks):  # complex128, for instance
            common = box.intersect(place)
            if common.numel > 0:
                value = unpack(self.content(key, place.start))
                out[common.seen_from(box.start).slices].copy_(value[common.seen_from(place.start).slices])

    def content(self, key: str, offsets: tuple[int, ...] = ()) -> bytes:
        """The bytes of a value that is no tensor, or of a tensor's chunk: a file of ``torch.save``."""
        info = self._info(key, offsets)
        path = self._folder / info.relative_path
        with readable(path, key), open_regular(path) as file:
            file.seek(info.offset)
            return file.read(info.length)

    def _tensor(self, key: str) -> Assembled:
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        shape, dtype = tuple(entry.size), entry.properties.dtype
        if dtype not in NAMES:
            expected = "a dtype that safetensors knows"
            raise failure(f"{key} has dtype {dtype}", expected=expected, fix="convert it", file=self._folder, key=key)
        parts = []
        for box in map(box_of, entry.chunks):
            info = self._info(key, box.start)
            parts.append((box, Chunk(self._folder / info.relative_path, key, dtype, box.shape, info.offset, info.length)))
        if sum(box.numel for box, _ in parts) != Box.whole(shape).numel:
            raise self._missing(key, f"all of {shape}")
        return Assembled(shape, tuple(parts))

    def _info(self, key: str, offsets: tuple[int, ...] = ()) -> Any:
        info = self._infos.get((key, offsets))
        if info is None:
            raise self._missing(key, f"the chunk at {offsets}" if offsets else "the bytes")
        return info

    def _missing(self, key: str, what: str) -> Exception:
        file = self._folder / METADATA
        return failure(f"{self._folder} does not have {what} of {key}", expected="all files of one save", file=file, key=key)
