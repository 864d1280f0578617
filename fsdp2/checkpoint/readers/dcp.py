"""DCP folders, of whatever saved them: FSDP1, torch's FSDP2, fsdp2, or a program without shards.

Each chunk of a tensor is a ``torch.save`` of its own inside a ``.distcp`` file; it is opened when it is read. It refuses to know what
the state means.
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
from ..failure import failure
from ..lazy import LazyTensor, Stored
from ..named_state import State
from ..regular_file import open_regular
from ..safe_dcp import METADATA, read_metadata, unpack
from ..safetensors_format import NAMES
from ..torch_pickle import description_of
from ..torch_zip import data_behind, head_nbytes
from .lazy_pieces import Assembled, dtype_of
from .torch_file import read_torch_file, stored

Infos = dict[tuple[str, tuple[int, ...]], Any]


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
        """Without taking the file apart, which costs more than reading a small tensor: it begins as ``DigestingWriter`` begins it."""
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
    infos = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    if any(getattr(info, "transform_descriptors", None) for info in infos.values()):
        raise failure(
            f"{folder} is compressed", expected="files without extensions", fix="load it with DCP, and save it without", file=folder
        )
    root: dict[Any, Any] = {}
    for key in metadata.state_dict_metadata:
        *path, last = (metadata.planner_data or {}).get(key, (key,))
        into = root
        for part in path:
            into = into.setdefault(part, {})
        into[last] = _value(folder, key, metadata, infos)
    return _with_lists(root)  # type: ignore[no-any-return]


class DcpChunks:
    """Where the values of a folder's keys lie."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder = folder
        self.metadata = metadata
        self._infos: Infos = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}

    def read(self, key: str, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Fill ``out`` with ``box`` of a tensor. Raises: CheckpointError"""
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.properties.dtype in NAMES:
            _tensor(self.folder, key, self.metadata, self._infos).read(box, out, reader)
            return
        for chunk in entry.chunks:  # complex128, for instance
            place = Box(tuple(chunk.offsets), tuple(start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)))
            common = box.intersect(place)
            if common.numel > 0:
                value = unpack(self.content(key, place.start))
                out[common.seen_from(box.start).slices].copy_(value[common.seen_from(place.start).slices])

    def content(self, key: str, offsets: tuple[int, ...] = ()) -> bytes:
        """The bytes of a value that is no tensor, or of a tensor's chunk: a file of ``torch.save``. Raises: CheckpointError"""
        info = self._infos.get((key, offsets))
        if info is None:
            raise _missing(self.folder, key, f"the chunk at {offsets}" if offsets else "the bytes")
        path = self.folder / info.relative_path
        try:
            with open_regular(path) as file:
                file.seek(info.offset)
                return file.read(info.length)
        except OSError as error:
            reason = error.strerror or error
            raise failure(f"{path} cannot be read at {key}: {reason}", expected="a readable file", file=path, key=key) from error


def _value(folder: Path, key: str, metadata: Metadata, infos: Infos) -> Any:
    entry = metadata.state_dict_metadata[key]
    if isinstance(entry, TensorStorageMetadata):
        return _tensor(folder, key, metadata, infos)
    info = infos.get((key, ()))
    if info is None:
        raise _missing(folder, key, "its bytes")
    return read_torch_file(folder / info.relative_path, info.offset, info.length)


def _tensor(folder: Path, key: str, metadata: Metadata, infos: Infos) -> Assembled:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    shape, dtype = tuple(entry.size), entry.properties.dtype
    if dtype not in NAMES:
        raise failure(f"{key} has dtype {dtype}", expected="a dtype that safetensors knows", fix="convert it", file=folder, key=key)
    parts = []
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)))
        info = infos.get((key, tuple(chunk.offsets)))
        if info is None:
            raise _missing(folder, key, f"the chunk at {tuple(chunk.offsets)}")
        parts.append((box, Chunk(folder / info.relative_path, key, dtype, tuple(chunk.sizes), info.offset, info.length)))
    if sum(box.numel for box, _ in parts) != Box.whole(shape).numel:
        raise _missing(folder, key, f"all of {shape}")
    return Assembled(shape, tuple(parts))


def _missing(folder: Path, key: str, what: str) -> Exception:
    return failure(f"{folder} does not have {what} of {key}", expected="all files of one save", file=folder / METADATA, key=key)


def _with_lists(node: Any) -> Any:
    """A path's string parts are keys; ints from 0 on without a gap are places in lists."""
    if not isinstance(node, dict):
        return node
    if node and sorted(map(str, node)) == sorted(map(str, range(len(node)))) and all(type(key) is int for key in node):
        return [_with_lists(node[index]) for index in range(len(node))]
    return {key: _with_lists(value) for key, value in node.items()}
