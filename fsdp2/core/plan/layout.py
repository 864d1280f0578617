"""Where every element of a parameter group lives on every rank: integers only.

A group's sharded parameters lie one after another in one flat shard. Each has a *slot* there, as large as the largest
shard on any rank, at a multiple of ``align`` elements. Its region in the unsharded storage starts at ``num_shards``
times the slot's offset and holds all ranks' slots one after another; cut on dim 0, it begins with the parameter.

Worked example: parameters (5, 4) and (4,) over 2 ranks, align 32 elements (128 bytes of fp32):

    parameter   rows of rank 0, 1   slot_numel   offset   region in the unsharded storage
    (5, 4)      [0, 3) [3, 5)               12        0   [0, 24); the parameter is [0, 20)
    (4,)        [0, 2) [2, 4)                2       32   [64, 68)

    flat shard: 64 elements per rank (50 of them padding); unsharded storage: 128 elements
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def rows_of(num_rows: int, rank: int, num_shards: int) -> range:
    """Rows of ``rank``, as in torch.chunk: ``rows_of(5, 1, 2)`` is ``range(3, 5)``; ``rows_of(5, 3, 4)`` is empty."""
    per_rank = -(-num_rows // num_shards)
    start = min(rank * per_rank, num_rows)
    return range(start, min(start + per_rank, num_rows))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """``contiguous_strides((5, 4)) == (4, 1)``."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter's cut: ``shape`` along ``dim`` into ``num_shards``; ``dim`` None: every rank keeps all of it."""

    shape: tuple[int, ...]
    dim: int | None
    num_shards: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """The shard's shape: ``Cut((5, 4), 0, 2).shard_shape(1) == (2, 4)``; an empty one keeps its other dims."""
        if self.dim is None:
            return self.shape
        rows = rows_of(self.shape[self.dim], rank, self.num_shards)
        return (*self.shape[: self.dim], len(rows), *self.shape[self.dim + 1 :])

    @property
    def slot_numel(self) -> int:
        """Elements that each rank reserves: the shard of rank 0, which no other exceeds."""
        return math.prod(self.shard_shape(0))

    @property
    def is_stacked(self) -> bool:
        """Whether all ranks' pieces lie one after another in the slots for every shape: cut on dim 0, or not cut."""
        return self.num_shards == 1 or self.dim is None or self.dim == 0

    @property
    def is_row_major(self) -> bool:
        """Whether all ranks' slots, in sequence, begin with the parameter: cut on its outermost dim, or not cut."""
        return self.num_shards == 1 or self.dim is None or math.prod(self.shape[: self.dim]) == 1


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: ``offset`` elements into the flat shard, ``gap`` elements of padding after it."""

    cut: Cut
    offset: int
    gap: int

    @property
    def numel(self) -> int:
        return self.cut.slot_numel

    @property
    def unsharded_offset(self) -> int:
        return self.offset * self.cut.num_shards

    @property
    def unsharded_numel(self) -> int:
        """Elements of its region in the unsharded storage that hold slots (the gap excluded)."""
        return self.numel * self.cut.num_shards


@dataclass(frozen=True)
class GroupLayout:
    """Slots of a whole group, in the order of its parameters, with the totals that follow from them."""

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int

    @property
    def unsharded_numel(self) -> int:
        return self.shard_numel * self.num_shards


def group_layout(cuts: Iterable[Cut], *, num_shards: int, align: int, block: int = 1) -> GroupLayout:
    """Lay ``cuts`` out one after another: each slot starts at, and the last ends at, a multiple of ``align`` elements.

    block: starts and end are also multiples of it: no block of so many elements has parts of two slots
    """
    align = math.lcm(align, block)
    slots = []
    offset = 0
    for cut in cuts:
        stop = round_up(offset + cut.slot_numel, align)
        slots.append(Slot(cut, offset, stop - offset - cut.slot_numel))
        offset = stop
    return GroupLayout(tuple(slots), num_shards, offset)


def gather_plan(cuts: Sequence[Cut], *, mode: str, direct_from_numel: int) -> tuple[list[int], list[int]]:
    """Which of ``cuts`` (by index) are gathered straight into the unsharded storage, and which travel packed.

    In the flat shard the packed ones lie after the direct ones: a packed gather sends one contiguous piece of it.

    mode: "auto" takes direct for at least ``direct_from_numel`` elements; "packed" and "direct" force one way; "mixed"
    alternates. A parameter not cut on its outermost dim can only travel packed. Uneven cuts may go direct: all slots
    but the last ones are full, so the padding lies after the parameter.
    """
    direct: list[int] = []
    packed: list[int] = []
    for index, cut in enumerate(cuts):
        wanted = {
            "auto": cut.numel >= direct_from_numel,
            "direct": True,
            "packed": False,
            "mixed": index % 2 == 0,
        }[mode]
        may_go = cut.dim is not None and cut.is_row_major and cut.numel > 0
        (direct if wanted and may_go else packed).append(index)
    return direct, packed
