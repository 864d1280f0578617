"""Reads boxes of stored tensors from untrusted paths, with bounded memory.

Worked example: rows [0, 4), columns [8, 16) of a (4, 1024) fp32 tensor are 4 runs of 32 bytes, 4096 bytes apart. Such
small gaps are read too and discarded, because a disk reads whole pages anyway: one read of 12320 bytes. For a
(4, 10**6) tensor: 4 reads.

Source: data sieving, Thakur et al. 1999, "Data Sieving and Collective I/O in ROMIO".
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from .failures import failure
from .shard_geometry import Box, split


def open_regular(path: Path) -> BinaryIO:
    """Open ``path`` for reading. Raises: OSError, also if it is not a regular file"""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path) -> int:
    """Open it as a descriptor, which the caller closes.

    Opening a named pipe blocks until a process writes to it, and a device may be endless; either may be named
    ``model.safetensors``.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # not to wait for a pipe's writer
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "it is not a regular file", str(path))
    return file


# --- byte ranges ------------------------------------------------------------------------------------------------------------------


BUFFER_NBYTES = 16 << 20
"""Memory for reads that need conversion, another device, strides, or gaps between runs."""

GAP_NBYTES = 16 << 10
"""Runs closer than this are read in one piece."""

MAX_OPEN_FILES = 8


class ByteReader:
    """Reads boxes of stored tensors into tensors, and counts. A context manager: it keeps files open.

    bytes_read: from files so far, gaps included
    Memory:     at most two buffers of BUFFER_NBYTES
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[Path, int] = {}
        self._buffers: dict[str, Tensor] = {}

    def __enter__(self) -> ByteReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, path: Path, key: str, offset: int, shape: Sequence[int], dtype: torch.dtype, box: Box, out: Tensor) -> None:
        """Fill ``out`` (of the box's shape; any dtype, device and strides) with ``box`` of the tensor stored at ``offset``.

        Raises: CheckpointError naming ``path`` and ``key``
        """
        if out.numel() == 0:
            return
        if out.dtype is dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(path, key, offset, shape, dtype.itemsize, box, bytes_of(out))
            torch.autograd.graph.increment_version(out)
            return
        staging = self._buffer("staging")
        for part in split(box, max(staging.numel() // dtype.itemsize, 1)):
            staged = staging[: part.numel * dtype.itemsize]
            self._fill(path, key, offset, shape, dtype.itemsize, part, bytes_of(staged))
            out[part.seen_from(box.start).slices].copy_(staged.view(dtype).view(part.shape))

    def content(self, path: Path, key: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset`` on. Raises: as ``read``"""
        found = bytearray(nbytes)
        self._pread(path, key, offset, memoryview(found))
        return bytes(found)

    def _fill(self, path: Path, key: str, offset: int, shape: Sequence[int], itemsize: int, box: Box, into: memoryview) -> None:
        """Write the bytes of ``box`` in C order to ``into``."""
        run, count, pitch, starts = runs_of(shape, itemsize, box)
        gap = pitch - run
        per_read = 1
        if count > 1 and gap <= GAP_NBYTES:
            per_read = max((BUFFER_NBYTES - run) // pitch + 1, 1)
        at = 0
        for start in starts:
            for first in range(0, count, per_read):
                rows = min(per_read, count - first)
                where = offset + start + first * pitch
                target = into[at : at + rows * run]
                if rows == 1:
                    self._pread(path, key, where, target)
                else:
                    self._sieve(path, key, where, rows, run, pitch, target)
                at += rows * run

    def _sieve(self, path: Path, key: str, offset: int, rows: int, run: int, pitch: int, into: memoryview) -> None:
        nbytes = (rows - 1) * pitch + run
        span = self._buffer("sieve")[:nbytes]
        self._pread(path, key, offset, bytes_of(span))
        target = torch.frombuffer(into, dtype=torch.uint8)
        target.view(rows, run).copy_(span.as_strided((rows, run), (pitch, 1)))

    def _pread(self, path: Path, key: str, offset: int, into: memoryview) -> None:
        try:
            file = self._open(path)
            done = 0
            while done < len(into):
                count = os.preadv(file, [into[done:]], offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise failure(
                f"{path} cannot be read at {key}: {error.strerror or error}",
                expected=f"{len(into)} bytes from byte {offset} on",
                fix="load it again once the disk works",
                file=path,
                key=key,
            ) from error
        self.bytes_read += done
        if done < len(into):
            raise failure(
                f"{path} has become shorter since its header was read: it ends within {key}",
                expected=f"{len(into)} bytes from byte {offset} on, got {done}",
                fix="do not write to the file while it is being loaded",
                file=path,
                key=key,
            )

    def _open(self, path: Path) -> int:
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= MAX_OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            file = open_descriptor(path)
        self._files[path] = file  # the last one in the dict is the last one used
        return file

    def _buffer(self, name: str) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(BUFFER_NBYTES, dtype=torch.uint8, device="cpu")
        return self._buffers[name]


def runs_of(shape: Sequence[int], itemsize: int, box: Box) -> tuple[int, int, int, Iterator[int]]:
    """The bytes of ``box`` (not empty) in a C-contiguous tensor of ``shape``: (run, count, pitch, starts).

    At each of ``starts`` begin ``count`` runs of ``run`` bytes, ``pitch`` bytes apart. For rows [1, 3) and all columns of a (4, 5)
    fp32 tensor: one run of 40 bytes at 20; for columns [1, 3): 4 runs of 8 bytes, 20 apart, from 4 on.
    """
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    dim = len(shape)  # dims from here on are one run
    run = itemsize
    while dim > 0 and run == (strides[dim - 1] if dim else itemsize):
        dim -= 1
        run = box.shape[dim] * strides[dim]
        if box.shape[dim] < shape[dim]:
            break
    outer = dim - 1
    while outer >= 0 and box.shape[outer] == 1:
        outer -= 1
    fixed = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    if outer < 0:
        return run, 1, run, iter((fixed,))
    dims = range(outer)
    starts = (
        fixed + sum(index * strides[dim] for index, dim in zip(indices, dims, strict=True))
        for indices in itertools.product(*(range(box.shape[dim]) for dim in dims))
    )
    return run, box.shape[outer], strides[outer], starts


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; it must outlive the view."""
    nbytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


@functools.lru_cache(maxsize=1000)  # DCP's metadata name a file for each chunk
def is_inside(name: str) -> bool:
    """Whether ``name`` is a relative path that stays in its folder, on any system; ``"a/b"`` does, ``"../b"`` does not.

    Symbolic links may lead anywhere: the cache of huggingface_hub is made of them.
    """
    windows = PureWindowsPath(name)
    parts = {*PurePosixPath(name).parts, *windows.parts}
    return bool(parts) and ".." not in parts and not windows.anchor and not name.startswith("/") and "\0" not in name
