"""The last touches of all bytes, and their streams.

Worked example: an operator writes the bytes [0, 8) of a block, another reads [4, 8): the block is two cells, [0, 4) with the write and
[4, 8) with both. A write to all of it must come after both touches, and leaves one cell that knows only itself.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp2.core.comm.streams import Stream


@dataclass(frozen=True, slots=True, eq=False)
class Touch:
    """One operator at one point of one stream. where: (file, line, function) of the Python frames, innermost first."""

    stream: Stream
    tick: int
    what: str
    where: tuple[tuple[str, int, str], ...]

    def __str__(self) -> str:
        frames = " < ".join(f"{os.path.basename(file)}:{line} {function}" for file, line, function in self.where)
        return f"{self.what} on {self.stream}, at {frames}"

    @property
    def site(self) -> tuple[object, ...]:
        return (self.stream, self.what, self.where)


@dataclass(frozen=True, slots=True)
class Race:
    """``later`` was started after ``earlier``, but nothing makes it run after.

    how:    in words; {earlier} and {later} stand for the operators
    memory: a description of the buffer
    """

    how: str
    earlier: Touch
    later: Touch
    memory: str

    def __str__(self) -> str:
        return f"{self.how}\n    earlier  {self.earlier}\n    later    {self.later}\n    buffer   {self.memory}"


class Cell:
    """The last touches of a range of bytes; a write leaves nothing before it to remember."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Touch | None, reads: dict[Stream, Touch]) -> None:
        self.write = write
        self.reads = reads


class Memory:
    """One allocation: [start, stop) in cells, cell i from ``starts[i]`` to the next start.

    allocated: None if we did not see it: before the recording, or inside an operator; then its owner is not known
    holders: the storages (``_cdata``) that keep it
    """

    __slots__ = ("allocated", "cells", "holders", "is_host", "start", "starts", "stop")

    def __init__(self, start: int, stop: int, allocated: Touch | None, is_host: bool) -> None:
        self.start = start
        self.stop = stop
        self.allocated = allocated
        self.is_host = is_host
        self.holders: set[int] = set()
        self.starts = [start]  # of the cells
        self.cells = [Cell(allocated, {})]

    def __str__(self) -> str:
        size = f"{self.stop - self.start} bytes"
        return f"{size}, whose allocation was not recorded" if self.allocated is None else f"{size}, by {self.allocated}"

    def _cut(self, address: int) -> int:
        """The index of the cell that begins at ``address``, cutting one in two if need be."""
        if address == self.stop:
            return len(self.cells)
        index = bisect.bisect_right(self.starts, address) - 1
        if self.starts[index] != address:
            index += 1
            before = self.cells[index - 1]
            self.starts.insert(index, address)
            self.cells.insert(index, Cell(before.write, before.reads.copy()))
        return index

    def touch(self, start: int, stop: int, touch: Touch, write: bool) -> list[Touch]:
        """Remember ``touch`` of [start, stop); returns the earlier ones that must be ordered before it."""
        first, last = self._cut(start), self._cut(stop)
        before: list[Touch] = []
        for cell in self.cells[first:last]:
            if cell.write is not None:
                before.append(cell.write)
            if write:
                before.extend(cell.reads.values())
            else:
                cell.reads[touch.stream] = touch
        if write:
            self.starts[first:last] = [start]
            self.cells[first:last] = [Cell(touch, {})]
        return before

    def last_touches(self) -> list[Touch]:
        found = {}
        for cell in self.cells:
            for touch in (cell.write, *cell.reads.values()):
                if touch is not None:
                    found[id(touch)] = touch
        return list(found.values())

    def forget(self) -> None:
        """All that came before is past."""
        self.starts = [self.start]
        self.cells = [Cell(None, {})]

    def absorb(self, other: Memory) -> None:
        """``other`` turned out to be a part of this one."""
        first, last = self._cut(other.start), self._cut(other.stop)
        self.starts[first:last] = other.starts
        self.cells[first:last] = other.cells


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses [start, stop) from the first to the last byte of ``tensor``."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


_LEAVE_OUT = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(contextlib.__file__) + os.sep + "contextlib",
    os.path.dirname(__file__) + os.sep,
)


def frames(most: int = 5) -> tuple[tuple[str, int, str], ...]:
    """The innermost frames of Python code that is neither torch's nor ours."""
    found: list[tuple[str, int, str]] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < most:
        code = frame.f_code
        if not code.co_filename.startswith(_LEAVE_OUT):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)
