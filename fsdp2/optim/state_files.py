"""Optimizer states in memory-mapped files: each is read ahead, worked on in place, and written back by a thread.

Worked example, files of three runs, one ahead

    ask for 0 | work on 0, ask for 1 | write 0 back, work on 1, ask for 2 | wait for 0; write 1 back, work on 2 | ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from ..core.plan.layout import round_up
from ..mapped_file import MappedFile

_ALIGNMENT = 128  # of each tensor in a file, as of slots in a flat shard


class StateFile(MappedFile):
    """Tensors by name, in one unnamed file.

    tensors: over its pages, which come into memory when they are touched
    """

    def __init__(self, folder: str, like: Mapping[str, Tensor]) -> None:
        """Copies of ``like``. Raises: FSDPError if the folder has no room for them."""
        super().__init__(folder, nbytes_in_file(like), "optimizer state")
        self.tensors = {}
        start = 0
        for name, tensor in like.items():
            self.tensors[name] = self.tensor(tensor.dtype, tensor.numel(), start).view(tensor.shape)
            self.tensors[name].copy_(tensor)
            start += round_up(tensor.nbytes, _ALIGNMENT)


def nbytes_in_file(like: Mapping[str, Tensor]) -> int:
    """Of a ``StateFile`` with copies of ``like``."""
    return sum(round_up(tensor.nbytes, _ALIGNMENT) for tensor in like.values())


class WriteBehind:
    """Files that a thread writes, at most ``max_files`` at a time: the faster side waits.

    in_memory, peak: bytes of the files that were asked for and are not written yet; the most so far
    """

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fsdp2-optimizer-state")
        self._under_way: deque[tuple[Future[None], MappedFile]] = deque()
        self._asked: set[MappedFile] = set()
        self.in_memory = self.peak = 0

    def ask_for(self, file: MappedFile) -> None:
        if file not in self._asked:
            self._asked.add(file)
            self.in_memory += file.nbytes
            self.peak = max(self.peak, self.in_memory)
            file.ask_for()

    def write(self, file: MappedFile) -> None:
        """Once more is under way than allowed, wait for the oldest. Raises: FSDPError if that could not be written."""
        self._under_way.append((self._thread.submit(file.write_back), file))
        self.wait(self._max_files)

    def wait(self, max_files: int = 0) -> None:
        """Wait until at most ``max_files`` are under way."""
        while len(self._under_way) > max_files:
            done, file = self._under_way.popleft()
            done.result()
            if file in self._asked:
                self._asked.discard(file)
                self.in_memory -= file.nbytes
