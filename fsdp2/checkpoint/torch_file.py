"""Files of ``torch.save``, read without loading them and without ``torch.load``, and written without copying tensors.

Such a file is a zip of uncompressed records: ``data.pkl`` describes the objects, and each storage is a record, read when it is wanted.
It may be a part of a larger file, as in DCP's. ``torch.save`` copies a tensor in pieces of a few KB through Python;
here the bytes around it are made once for each dtype and shape, and the tensor is one write from where it lies.

Worked example, a (2,) fp32 tensor: records ``archive/data.pkl`` (which says dtype, shape and that the storage is "0"),
``archive/byteorder``, ``archive/version``, then ``archive/data/0`` with its 8 bytes, then the directory, which repeats the records'
names, lengths and CRC-32 and says where they begin.

Memory: the description; no tensor.
Source: PKWARE's APPNOTE.TXT 6.3, section 4.3.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import math
import pickle
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..torch_names import torch_name
from .failures import failure, readable
from .file_reading import open_regular
from .inert_pickle import STORAGE_DTYPES, SavedTensor, unpickle
from .lazy_tensors import NAMES, LazyTensor, Signed, Stored, Strided

REBUILD_TENSOR = torch_name("torch._utils._rebuild_tensor_v2")
REBUILD_TENSOR_OF_DTYPE = torch_name("torch._utils._rebuild_tensor_v3")
"""The functions that ``torch.load`` calls to make a tensor of a typed storage, and of an untyped one."""

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
    return unpickle(zipped.read(f"{prefix}data.pkl"), _Records(path, zipped, prefix, file, base).lazy)


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


class _Records:
    """Where the storages of a file lie, which begins at byte ``base`` of ``file``."""

    def __init__(self, path: Path, zipped: zipfile.ZipFile, prefix: str, file: BinaryIO, base: int) -> None:
        self._path = path
        self._zipped = zipped
        self._prefix = prefix
        self._file = file
        self._base = base
        self._known: dict[str, tuple[int, int]] = {}
        starts = sorted([*(info.header_offset for info in zipped.infolist()), zipped.start_dir])
        self._following = dict(itertools.pairwise(starts))

    def _find(self, key: str) -> tuple[int, int]:
        """The first byte of a storage, and how many there are. Raises: ValueError"""
        if key not in self._known:
            info = self._zipped.getinfo(f"{self._prefix}data/{key}")
            self._file.seek(self._base + info.header_offset)
            magic, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
            own_name = self._file.read(name_nbytes).decode("utf-8" if info.flag_bits & 0x800 else "cp437")
            start = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
            end = start + info.file_size
            self._file.seek(self._base + end)
            has_descriptor = info.flag_bits & 0x8
            ends_there = self._file.read(4) == b"PK\x07\x08" if has_descriptor else end == self._following[info.header_offset]
            if magic != b"PK\x03\x04" or own_name != info.orig_filename or not ends_there:
                raise ValueError(f"its directory does not lead to {info.orig_filename}")
            self._known[key] = self._base + start, info.file_size
        return self._known[key]

    def lazy(self, saved: SavedTensor) -> LazyTensor:
        """Raises: CheckpointError, ValueError"""
        name = f"data/{saved.key}"
        if saved.dtype not in NAMES:
            raise failure(
                f"{self._path} cannot be read: tensor {name} {saved.shape} is of {saved.dtype}",
                expected=f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in NAMES)}",
                fix="load it with torch.load(weights_only=True), and save it in one of these",
                file=self._path,
            )
        itemsize = saved.dtype.itemsize
        start, nbytes = self._find(saved.key)
        last = sum((size - 1) * stride for size, stride in zip(saved.shape, saved.stride, strict=True))
        span = 0 if 0 in saved.shape else last + 1
        if min((*saved.stride, saved.offset, *saved.shape), default=0) < 0 or (saved.offset + span) * itemsize > nbytes:
            raise ValueError(f"tensor {name} {saved.dtype} {saved.shape} does not fit its storage of {nbytes} bytes")
        if math.prod(saved.shape) * itemsize > max(_MAX_EXPANDED_NBYTES, _MAX_EXPANSION * span * itemsize):
            raise ValueError(f"tensor {name} {saved.shape} repeats the {span * itemsize} bytes that are stored of it")
        where = start + saved.offset * itemsize
        found: LazyTensor
        if torch.empty_strided(saved.shape, saved.stride, device="meta").is_contiguous():
            found = stored(self._path, name, saved.dtype, saved.shape, where)
        else:
            found = Strided(stored(self._path, name, saved.dtype, (span,), where), saved.shape, saved.stride)
        return Signed(found, saved.bits) if saved.bits else found


def stored(path: Path, key: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Stored:
    return Stored(path, key, NAMES[dtype], shape, offset, math.prod(shape) * dtype.itemsize)


# --- descriptions -----------------------------------------------------------------------------------------------------------------


_TYPED = {dtype: getattr(torch, name) for name, dtype in STORAGE_DTYPES.items() if name != "UntypedStorage"}


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
            return REBUILD_TENSOR, arguments
        return REBUILD_TENSOR_OF_DTYPE, (*arguments, stored.dtype)


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


# --- the bytes around a tensor's own ----------------------------------------------------------------------------------------------


class _At(io.BytesIO):
    """The end of a file, from byte ``start`` on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def tell(self) -> int:
        return self._start + super().tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "zipfile writes the directory where the records end"
        return self._start + super().seek(offset - self._start)


def around(description: bytes, data: memoryview) -> tuple[bytes, bytes]:
    """The bytes before and after ``data`` in a file whose ``data.pkl`` is ``description``; the latter are the directory."""
    head, in_head, tail, in_tail = without_crc(description, len(data))
    crc = struct.pack("<I", zlib.crc32(data))
    return head[:in_head] + crc + head[in_head + 4 :], tail[:in_tail] + crc + tail[in_tail + 4 :]


def data_behind(start: bytes, description: bytes, nbytes: int) -> bool:
    """Whether ``start`` are the bytes before ``nbytes`` bytes of data in such a file, for any data."""
    head, in_head, *_ = without_crc(description, nbytes)
    return start[:in_head] == head[:in_head] and start[in_head + 4 :] == head[in_head + 4 :]


def head_nbytes(description: bytes, nbytes: int) -> int:
    return len(without_crc(description, nbytes)[0])


@functools.lru_cache(maxsize=10_000)
def without_crc(description: bytes, nbytes: int) -> tuple[bytes, int, bytes, int]:
    """Both for ``nbytes`` bytes of data, and where in each its CRC-32 goes: a training saves the same shapes again and again."""
    head, infos = b"", []
    for name, record in (("data.pkl", description), ("byteorder", b"little"), ("version", b"3\n"), ("data/0", b"")):
        info = zipfile.ZipInfo(f"archive/{name}")
        info.header_offset = len(head)
        info.file_size = info.compress_size = len(record) or nbytes
        info.CRC = zlib.crc32(record)  # 0 for the data
        head += info.FileHeader() + record
        infos.append(info)
    with _At(len(head) + nbytes) as end:
        with zipfile.ZipFile(end, "w") as zipped:
            zipped.filelist += infos
        tail = end.getvalue()
    return head, info.header_offset + 14, tail, tail.index(b"archive/data/0") - 30
