"""Files of ``torch.save`` as lazy tensors that are read by byte ranges, without loading the file and without ``torch.load``.

Such a file is an uncompressed zip: ``data.pkl`` describes the objects, and each storage is an entry whose bytes are read when wanted.
It may be a part of a larger file, as in DCP's.

Memory: the description; no tensor.
"""

from __future__ import annotations

import io
import itertools
import math
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...errors import CheckpointError
from ..failure import failure, readable
from ..lazy import LazyTensor, Stored
from ..regular_file import open_regular
from ..safetensors_format import NAMES, Entry
from .inert_pickle import SavedTensor, unpickle
from .lazy_pieces import Signed, Strided, is_contiguous

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # its first bytes, and the lengths of the name and the extra fields that follow
_MAX_EXPANDED_NBYTES = 1 << 30
_MAX_EXPANSION = 16
"""A tensor that repeats its elements (strides of 0) may be so large, or so many times larger than they: written out, it has no end."""


def is_torch_file(path: Path) -> bool:
    """Whether it begins like one of ``torch.save``: a zip, or the format before torch 1.6."""
    with readable(path), open_regular(path) as file:
        start = file.read(64)
    return start.startswith(b"PK\x03\x04") or b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in start


def read_torch_file(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """The objects of the file, or of ``length`` bytes of it from ``offset`` on; each tensor is a LazyTensor, unknown classes are Inert.

    Raises: CheckpointError naming the file: it is cut short, none of torch.save's, or has a dtype that no target can hold
    """
    try:
        with open_regular(path) as file:
            nbytes = file.seek(0, io.SEEK_END) - offset if length is None else length
            return _read(path, zipfile.ZipFile(Window(file, offset, nbytes)), file, offset)
    except CheckpointError:
        raise
    except Exception as error:  # a broken file may raise any error
        raise failure(
            f"{path} cannot be read: {str(error) or type(error).__name__}",
            expected="a whole file that torch.save of torch 1.6 or later wrote",
            fix="copy it again; load and save an older one with torch.load(weights_only=True) and torch.save",
            file=path,
        ) from error


class Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, nbytes: int) -> None:
        self._file = file
        self._offset = offset
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._nbytes - self._at, 0)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


@dataclass(frozen=True)
class _Record:
    offset: int
    nbytes: int


def _read(path: Path, zipped: zipfile.ZipFile, file: BinaryIO, base: int) -> Any:
    for info in zipped.infolist():
        if info.CRC == 0:  # of torch.serialization.set_crc32_options(False), which zipfile would take for damage
            info.CRC = None  # type: ignore[assignment]
    twice = [name for name, count in Counter(zipped.namelist()).items() if count > 1]
    if twice:  # readers would take different ones
        raise ValueError(f"it has {twice[0]} twice")
    prefix = _prefix(zipped)
    compressed = [info.filename for info in zipped.infolist() if info.compress_type != zipfile.ZIP_STORED]
    if compressed:  # a thousand times its size may be in it, and torch.save never does that
        raise ValueError(f"{compressed[0]} is compressed")
    byteorder = f"{prefix}byteorder"
    if byteorder in zipped.NameToInfo and zipped.read(byteorder) != b"little":
        raise ValueError("it was written on a big-endian machine")
    return unpickle(zipped.read(f"{prefix}data.pkl"), _lazily(path, _finder(zipped, prefix, file, base)))


def _prefix(zipped: zipfile.ZipFile) -> str:
    """What the names of its records begin with: "rank_0/" in a file that was saved as rank_0.pt, "archive/" where no name was known."""
    names = [name for name in zipped.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(names) != 1:
        raise ValueError("it is a zip without a data.pkl")
    return names[0].removesuffix("data.pkl")


def refuse_exchanged(paths: Sequence[Path]) -> None:
    """Raises: CheckpointError if a file in ``paths``, which are in the order of ranks, was saved under the name of another of them"""
    stems = [path.stem for path in paths]
    last = -1
    for path in paths:
        with open_regular(path) as file, zipfile.ZipFile(file) as zipped:
            name = _prefix(zipped).removesuffix("/")
        if name not in stems:
            continue  # all may have been renamed
        if stems.index(name) <= last:
            raise failure(
                f"{path} was saved as {name}{path.suffix}",
                expected="the file of each rank under its own name: its order is that of the elements",
                fix="copy the files again; nothing was changed",
                file=path,
            )
        last = stems.index(name)


def _finder(zipped: zipfile.ZipFile, prefix: str, file: BinaryIO, base: int) -> Callable[[str], _Record]:
    known: dict[str, _Record] = {}
    following = dict(itertools.pairwise(sorted([*(info.header_offset for info in zipped.infolist()), zipped.start_dir])))

    def find(key: str) -> _Record:
        if key not in known:
            info = zipped.getinfo(f"{prefix}data/{key}")
            file.seek(base + info.header_offset)
            magic, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            own_name = file.read(name_nbytes).decode("utf-8" if info.flag_bits & 0x800 else "cp437")
            start = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
            end = start + info.file_size
            file.seek(base + end)
            has_descriptor = info.flag_bits & 0x8
            ends_there = file.read(4) == b"PK\x07\x08" if has_descriptor else end == following[info.header_offset]
            if magic != b"PK\x03\x04" or own_name != info.orig_filename or not ends_there:
                raise ValueError(f"its directory does not lead to {info.orig_filename}")
            known[key] = _Record(base + start, info.file_size)
        return known[key]

    return find


def _lazily(path: Path, find: Callable[[str], _Record]) -> Callable[[SavedTensor], LazyTensor]:
    def lazy(saved: SavedTensor) -> LazyTensor:
        found = elements(saved)
        return Signed(found, saved.bits) if saved.bits else found

    def elements(saved: SavedTensor) -> LazyTensor:
        record = find(saved.key)
        last = sum((size - 1) * stride for size, stride in zip(saved.shape, saved.stride, strict=True))
        span = 0 if 0 in saved.shape else last + 1
        itemsize = saved.dtype.itemsize
        if (
            min((*saved.stride, saved.offset, *saved.shape), default=0) < 0
            or (saved.offset + span) * itemsize > record.nbytes
            or saved.dtype not in NAMES
        ):
            raise ValueError(f"tensor data/{saved.key} {saved.dtype} {saved.shape} does not fit its storage of {record.nbytes} bytes")
        if math.prod(saved.shape) * itemsize > max(_MAX_EXPANDED_NBYTES, _MAX_EXPANSION * span * itemsize):
            raise ValueError(f"tensor data/{saved.key} {saved.shape} repeats the {span * itemsize} bytes that are stored of it")
        where = record.offset + saved.offset * itemsize
        name = f"data/{saved.key}"
        if is_contiguous(saved.shape, saved.stride):
            return stored(path, name, saved.dtype, saved.shape, where)
        return Strided(stored(path, name, saved.dtype, (span,), where), saved.shape, saved.stride)

    return lazy


def stored(path: Path, key: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Stored:
    return Stored(path, key, Entry(NAMES[dtype], shape, offset, math.prod(shape) * dtype.itemsize))
