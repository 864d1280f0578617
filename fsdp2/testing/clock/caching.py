"""A model of torch's caching allocator for CUDA: which bytes a program's allocations reserve.

Sizes are rounded up to 512 bytes. Blocks of at most 1 MiB are cut from segments of 2 MiB, larger ones below 10 MiB from segments of
20 MiB, all others get segments rounded up to 2 MiB. A freed block is merged with free neighbors and belongs to the stream it was cut
for. The smallest free block that is large enough is taken, and what remains of it is split off if worth keeping. A block that another
stream has used (``record_stream``) is free once that stream has passed. Source: the documented constants of torch's
c10/cuda/CUDACachingAllocator.cpp; expandable segments and garbage collection are not modeled.

Worked example: 3 MiB are asked for. A segment of 20 MiB is reserved and 17 MiB of it stay free; 9 MiB and 8 MiB then fit there, and
another 2 MiB need a segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

_MIB = 1 << 20
_SMALL = _MIB


@dataclass(slots=True, eq=False)
class _Block:
    nbytes: int
    pool: tuple[int, bool]
    order: int
    free: bool = False
    before: _Block | None = None
    behind: _Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """allocated, reserved: bytes now; peak_*: the most since ``reset_peak``; segments: how many the device was asked for"""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    segments: int = 0
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _free: dict[tuple[int, bool], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _by_order: dict[int, _Block] = field(default_factory=dict)
    _orders: int = 0
    _deferred: list[tuple[float, _Block]] = field(default_factory=list)

    def alloc(self, block_id: int, nbytes: int, stream: int, now: float) -> None:
        """Allocate at host time ``now``; deferred blocks whose events have passed come back before."""
        if self._deferred:
            passed = [block for when, block in self._deferred if when <= now]
            self._deferred = [(when, block) for when, block in self._deferred if when > now]
            for block in passed:
                self._give_back(block)
        size = -(-nbytes // 512) * 512
        small = size <= _SMALL
        pool = (stream, small)
        free = self._free[pool]
        index = bisect_left(free, (size, -1))
        if index < len(free):
            block = self._by_order[free.pop(index)[1]]
        else:
            whole = 2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
            block = self._new(whole, pool)
            self.reserved += whole
            self.segments += 1
        block.free = False
        rest = block.nbytes - size
        if rest >= 512 if small else rest > _SMALL:
            behind = self._new(rest, pool)
            behind.before, behind.behind, behind.free = block, block.behind, True
            if block.behind is not None:
                block.behind.before = behind
            block.behind, block.nbytes = behind, size
            insort(free, (rest, behind.order))
        self._blocks[block_id] = block
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, block_id: int, usable_from: float | None = None) -> None:
        """usable_from: when the streams that used it have passed; None: at once"""
        block = self._blocks.pop(block_id, None)
        if block is None:
            return  # it is older than the trace
        self.allocated -= block.nbytes
        if usable_from is None:
            self._give_back(block)
        else:
            self._deferred.append((usable_from, block))

    def reset_peak(self) -> None:
        """Peaks are counted from now on."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        """Give back segments without a block in use."""
        for free in self._free.values():
            for nbytes, order in list(free):
                block = self._by_order[order]
                if block.before is None and block.behind is None:
                    free.remove((nbytes, order))
                    del self._by_order[order]
                    self.reserved -= nbytes

    def _new(self, nbytes: int, pool: tuple[int, bool]) -> _Block:
        self._orders += 1
        block = self._by_order[self._orders] = _Block(nbytes, pool, self._orders)
        return block

    def _give_back(self, block: _Block) -> None:
        free = self._free[block.pool]
        block.free = True
        if block.before is not None and block.before.free:
            free.remove((block.before.nbytes, block.before.order))
            block = self._merged(block.before, block)
        if block.behind is not None and block.behind.free:
            free.remove((block.behind.nbytes, block.behind.order))
            block = self._merged(block, block.behind)
        insort(free, (block.nbytes, block.order))

    def _merged(self, left: _Block, right: _Block) -> _Block:
        left.nbytes += right.nbytes
        left.behind = right.behind
        if left.behind is not None:
            left.behind.before = left
        del self._by_order[right.order]
        return left
