"""Memory-mapped files that hold optimizer states: each is read ahead, worked on in place, and written behind by a thread.

A file has no name: it is unlinked before anything is written, and the system gives its room back when the process ends, however that
ends. So no half-written state is left that a later run could take for good; checkpoints are what outlives a process. It refuses to
know optimizers.

Worked example, files of three runs, one ahead

    ask for 0 | work on 0, ask for 1 | write 0 behind, work on 1, ask for 2 | wait for 0; write 1 behind, work on 2 | ...
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ..errors import ArgumentError, FSDPError

_ALIGNMENT = 128  # of each tensor in a file, as of slots in a flat shard


def _unnamed_file(folder: str) -> int:
    """Open for reading and writing. Raises: OSError"""
    file, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return file


def check_folder(folder: str) -> None:
    """Make a file there, of one byte. Raises: ArgumentError if that fails. Rights do not tell: /proc takes no files."""
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
            fix="make the folder, or name another one: on a local disk, with room for the states of this host's ranks",
        ) from error


class StateFile:
    """Tensors by name, in one unnamed file.

    nbytes:  of the file
    tensors: over its pages, which come into memory when they are touched
    """

    def __init__(self, folder: str, like: Mapping[str, Tensor]) -> None:
        """Copies of ``like``. Raises: FSDPError if the folder has no room for them."""
        starts, end = {}, 0
        for name, tensor in like.items():
            starts[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = max(end, 1)
        self._file = -1
        try:
            self._file = _unnamed_file(folder)
            # Now: a page that the disk has no room for kills the process when it is written.
            os.posix_fallocate(self._file, 0, self.nbytes)
            self._map = mmap.mmap(self._file, self.nbytes)
        except OSError as error:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            raise FSDPError(
                f"{folder} does not take {self.nbytes:,} bytes of optimizer state: {error}",
                expected="a folder on a disk with room for the states of this rank, beside those of others on its host",
                fix="make room, or name another folder: DiskOffloadPolicy(path)",
            ) from error
        self.tensors = {}
        for name, tensor in like.items():
            flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=starts[name])
            self.tensors[name] = flat.view(tensor.shape)
            self.tensors[name].copy_(tensor)

    def ask_for(self) -> None:
        """Start to read it; the system does that while we go on."""
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_WILLNEED)
        self._map.madvise(mmap.MADV_WILLNEED)

    def write_back(self) -> None:
        """Write what has changed, and give the memory back. Values stay: whoever touches them has them read again."""
        os.fdatasync(self._file)
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class WriteBehind:
    """Files that a thread writes, at most ``max_files`` at a time: whoever is faster waits.

    in_memory, peak: bytes of the files that were asked for and are not written yet; the most so far
    """

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fsdp2-optimizer-state")
        self._under_way: deque[tuple[Future[None], StateFile]] = deque()
        self._asked: set[StateFile] = set()
        self.in_memory = self.peak = 0

    def ask_for(self, file: StateFile) -> None:
        if file not in self._asked:
            self._asked.add(file)
            self.in_memory += file.nbytes
            self.peak = max(self.peak, self.in_memory)
            file.ask_for()

    def write(self, file: StateFile) -> None:
        """Once more is under way than allowed, wait for the oldest. Raises: OSError if that could not be written."""
        self._under_way.append((self._thread.submit(file.write_back), file))
        self.wait(self._max_files)

    def wait(self, max_files: int = 0) -> None:
        """Until at most ``max_files`` are under way."""
        while len(self._under_way) > max_files:
            done, file = self._under_way.popleft()
            done.result()
            self._asked.discard(file)
            self.in_memory -= file.nbytes
