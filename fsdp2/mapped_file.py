"""Memory-mapped files without names: a crash at any moment leaves no file, and the system gives their disk space back.

Pages come into memory when they are touched, or asked for before, and leave it when they are let go. So a crash leaves no half-written
state that a later run could take for good; only checkpoints outlive a process. ``ReadAhead`` knows which file is touched next;
``WriteBehind`` has a thread write what was changed.

Worked example, parameters of units a, b, c, one ahead; the second forward and backward

    read        a      | b      | c      | c      | b      | a
    asked for   b      | c      | c (it followed b, c in the first) | b | a | a (of the next forward)
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, FSDPError
from .policy import DiskOffloadPolicy


class MappedFile:
    """A file in memory. nbytes: its size"""

    def __init__(self, folder: str, nbytes: int, what: str) -> None:
        """what: its content, for the error message. Raises: FSDPError if the folder has no room"""
        self.nbytes = max(nbytes, 1)
        self._what = f"{what} in {folder}"
        self.number = next(_numbers)
        self._file = -1
        try:
            self._file = _unnamed_file(folder)
            # Allocate now: a page that the disk has no room for kills the process when it is written.
            os.posix_fallocate(self._file, 0, self.nbytes)
            self._map = mmap.mmap(self._file, self.nbytes)
        except OSError as error:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            raise FSDPError(
                f"{folder} does not take {self.nbytes:,} bytes of {what}: {error}",
                expected="a folder on a disk with room for this rank's, in addition to those of others on its host",
                fix="make room, or name another folder: DiskOffloadPolicy(path)",
            ) from error

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> Tensor:
        """A tensor (numel,) over the bytes from ``offset`` on."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def ask_for(self) -> None:
        """Let the system start to read the file while we go on."""
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_WILLNEED)
        self._map.madvise(mmap.MADV_WILLNEED)

    def let_go(self) -> None:
        """Give the memory back, but for changes that are not written yet. Values stay: the next touch reads them again."""
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def write_back(self) -> None:
        """Write the changes, and give the memory back. Raises: FSDPError if the disk does not take them"""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise FSDPError(
                f"the disk does not take {self.nbytes:,} bytes of {self._what}: {error}",
                expected="a disk that writes what it has promised room for: values may be lost now",
                fix="look at the disk and its quotas, name another folder, and go on from the last checkpoint",
            ) from error
        self.let_go()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


_numbers = itertools.count()
_ALIGNMENT = 128  # in bytes, of tensors that share a file, as of slots in a flat shard


@torch.no_grad()
def mapped(folder: str, tensors: Iterable[Tensor], what: str) -> tuple[MappedFile, list[tuple[Tensor, Tensor]]]:
    """One file, with each of ``tensors`` and its copy in the file's memory, which has the same values and strides.

    Raises: FSDPError if the folder has no room
    """
    found = list({id(tensor): tensor for tensor in tensors}.values())
    spans = [0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in found]
    starts = [0]
    for tensor, span in zip(found, spans, strict=True):
        starts.append(starts[-1] + _aligned(span * tensor.element_size()))
    file = MappedFile(folder, starts[-1], what)
    return file, [
        (tensor, file.tensor(tensor.dtype, span, start).as_strided(tensor.shape, tensor.stride()).copy_(tensor))
        for tensor, start, span in zip(found, starts, spans, strict=False)
    ]


def nbytes_in_file(tensors: Iterable[Tensor]) -> int:
    """The size of a file that ``mapped`` makes for ``tensors``, each contiguous."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _unnamed_file(folder: str) -> int:
    """Open a file for reading and writing. Raises: OSError"""
    file, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return file


def check_disk_policy(policy: DiskOffloadPolicy) -> None:
    """Raises: ArgumentError if the policy's values cannot work."""
    read_ahead: Any = policy.read_ahead
    if not isinstance(read_ahead, int) or read_ahead < 0:
        raise ArgumentError(
            f"DiskOffloadPolicy got read_ahead={read_ahead!r}", expected="an int, 0 or more", fix="pass another read_ahead"
        )
    path: Any = policy.path
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"DiskOffloadPolicy got path={path!r}", expected="a folder on a local disk", fix="pass another path")
    _check_folder(os.fspath(path))


def _check_folder(folder: str) -> None:
    """Make a file of one byte there. Raises: ArgumentError if that fails. Access rights are not enough: /proc takes no files."""
    try:
        file = _unnamed_file(folder)
        try:
            os.posix_fallocate(file, 0, 1)
        finally:
            os.close(file)
    except OSError as error:
        raise ArgumentError(
            f"DiskOffloadPolicy got path={folder!r}, which takes no files: {error}",
            expected="a folder that exists, and that this process may write to",
            fix="make the folder, or name another one: on a local disk, with room for this host's ranks",
        ) from error


class _FilesInMemory:
    """Counts the files that were asked for or read and not given up yet. in_memory, peak: their bytes; the most so far"""

    def __init__(self) -> None:
        self._files_there: set[MappedFile] = set()
        self.in_memory = self.peak = 0

    def _enter(self, file: MappedFile) -> bool:
        """Count ``file``; False if it is there already."""
        if file in self._files_there:
            return False
        self._files_there.add(file)
        self.in_memory += file.nbytes
        self.peak = max(self.peak, self.in_memory)
        return True

    def _leave(self, file: MappedFile) -> bool:
        """Count ``file`` no more; False if it was not there."""
        if file not in self._files_there:
            return False
        self._files_there.discard(file)
        self.in_memory -= file.nbytes
        return True


class ReadAhead(_FilesInMemory):
    """Asks for the files that come next: those that followed the last two files when these were read before."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)
        self._files: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()
        self._asked: deque[MappedFile] = deque()  # files that were asked for and not read yet

    def begin(self, file: MappedFile, num_ahead: int) -> None:
        """``file`` is read now; ask for the next ``num_ahead`` files."""
        self._files[file.number] = file
        self._next[self._last] = file.number
        self._last = (self._last[1], file.number)
        if file in self._asked:
            self._asked.remove(file)
        self._enter(file)
        last = self._last
        for _ in range(num_ahead):
            number = self._next.get(last)
            following = None if number is None else self._files.get(number)
            if number is None or following is None:
                return
            last = (last[1], number)
            if following not in self._files_there:
                while len(self._asked) >= num_ahead:  # the order has changed
                    self.end(self._asked.popleft())
                following.ask_for()
                self._asked.append(following)
                self._enter(following)

    def end(self, file: MappedFile) -> None:
        """``file`` has been read: let it go."""
        if self._leave(file):
            file.let_go()


READ_AHEAD = ReadAhead()
"""For the flat shards that this process keeps in files."""


class WriteBehind(_FilesInMemory):
    """Files that a thread writes, at most ``max_files`` at a time: the faster side waits."""

    def __init__(self, max_files: int) -> None:
        super().__init__()
        self._max_files = max_files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fsdp2-optimizer-state")
        self._under_way: deque[tuple[Future[None], MappedFile]] = deque()

    def ask_for(self, file: MappedFile) -> None:
        if self._enter(file):
            file.ask_for()

    def write(self, file: MappedFile) -> None:
        """If more than ``max_files`` are under way now, wait for the oldest. Raises: FSDPError if the disk does not take it."""
        self._under_way.append((self._thread.submit(file.write_back), file))
        self.wait(self._max_files)

    def wait(self, max_files: int = 0) -> None:
        """Wait until at most ``max_files`` are under way."""
        while len(self._under_way) > max_files:
            done, file = self._under_way.popleft()
            done.result()
            self._leave(file)
