"""Where every element of a parameter group lives on every rank: integers only.

A group's sharded parameters lie one after another in one flat shard; each has a *slot* there, as large as the largest shard
that any rank keeps, starting at a multiple of ``align`` elements. Its region in the unsharded storage starts at
``num_shards`` times the slot's offset and holds the slots of all ranks one after another, which for a cut on dim 0 begins with
the parameter. This file refuses to know torch.distributed, devices and dtypes.

Worked example: parameters (5, 4) and (4,) over 2 ranks, align 32 elements (128 bytes of fp32):

    parameter   rows of rank 0, 1   slot_numel   offset   region in the unsharded storage
    (5, 4)      [0, 3) [3, 5)               12        0   [0, 24), of which [0, 20) is the parameter
    (4,)        [0, 2) [2, 4)                2       32   [64, 68)

    flat shard: 64 elements a rank (50 of them padding); unsharded storage: 128 elements
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """Half-open range [start, stop) of the sharded dim that one rank stores; may be empty."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def rows_of(num_rows: int, rank: int, num_shards: int) -> Rows:
    """Rows kept by ``rank``, split as ``torch.chunk`` does: ``rows_of(5, 1, 2) == Rows(3, 5)``, ``rows_of(5, 3, 4) == Rows(5, 5)``."""
    per_rank = -(-num_rows // num_shards)
    start = min(rank * per_rank, num_rows)
    return Rows(start, min(start + per_rank, num_rows))


def round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut: ``shape`` along ``dim`` into ``num_shards``; ``dim`` None: every rank keeps all of it."""

    shape: tuple[int, ...]
    dim: int | None
    num_shards: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``: ``Cut((5, 4), 0, 2).shard_shape(1) == (2, 4)``; an empty one keeps its other dims."""
        if self.dim is None:
            return self.shape
        rows = rows_of(self.shape[self.dim], rank, self.num_shards)
        return (*self.shape[: self.dim], len(rows), *self.shape[self.dim + 1 :])

    @property
    def slot_numel(self) -> int:
        """Elements that each rank reserves: the shard of rank 0, which no other exceeds."""
        return math.prod(self.shard_shape(0))

    @property
    def is_row_major(self) -> bool:
        """Whether the slots of all ranks, one after another, begin with the parameter: cut on its outermost dim, or not cut."""
        return self.num_shards == 1 or self.dim is None or math.prod(self.shape[: self.dim]) == 1


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: ``offset`` elements into the flat shard, ``gap`` elements of padding behind it."""

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


def group_layout(cuts: Iterable[Cut], *, num_shards: int, align: int) -> GroupLayout:
    """Lay ``cuts`` out one after another, each slot starting at a multiple of ``align`` elements; the total is one as well."""
    slots = []
    offset = 0
    for cut in cuts:
        stop = round_up(offset + cut.slot_numel, align)
        slots.append(Slot(cut, offset, stop - offset - cut.slot_numel))
        offset = stop
    return GroupLayout(tuple(slots), num_shards, offset)


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Which parameters (by index) are gathered straight into the unsharded storage, and which travel packed.

    In the flat shard the packed ones lie behind the direct ones, so that a packed gather sends one contiguous piece of it.
    """

    direct: tuple[int, ...]
    packed: tuple[int, ...]


def gather_plan(cuts: Sequence[Cut], *, mode: str, direct_from_numel: int) -> GatherPlan:
    """Choose how each parameter travels.

    mode: "auto" takes direct for what has at least ``direct_from_numel`` elements; "packed" and "direct" force one way; "mixed"
    alternates. What is not cut on its outermost dim can only travel packed. Uneven cuts may go direct: all slots but the last
    ones are full, so that the padding comes to lie behind the parameter.
    """
    direct = []
    for index, cut in enumerate(cuts):
        wanted = {
            "auto": cut.numel >= direct_from_numel,
            "direct": True,
            "packed": False,
            "mixed": index % 2 == 0,
        }[mode]
        if wanted and cut.dim is not None and cut.is_row_major and cut.numel > 0:
            direct.append(index)
    packed = tuple(index for index in range(len(cuts)) if index not in set(direct))
    return GatherPlan(tuple(direct), packed)


@dataclass(frozen=True, slots=True)
class TransientBytes:
    """What one group adds to the sharded parameters and optimizer state in one step, in bytes: the terms of the peak-memory sum.

    unsharded:        its unsharded storage
    gather_buffers:   packed all-gather output and cast input, alive from issue to copy-out
    unsharded_grads:  gradients as autograd leaves them, in param dtype
    reduce_input, reduce_output: of the reduce-scatter, in reduce dtype
    reduce_received:  what the reduce-scatter's algorithm receives into, beside its output
    sharded_grads:    the flat buffer that the sharded gradients are views of, in storage dtype; if that is the reduce dtype, it
                      is the reduce output itself
    """

    unsharded: int
    gather_buffers: int
    unsharded_grads: int
    reduce_input: int
    reduce_output: int
    reduce_received: int
    sharded_grads: int


def transient_bytes(
    layout: GroupLayout,
    reduce_layout: GroupLayout,
    *,
    num_direct: int,
    itemsize: int,
    param_itemsize: int,
    reduce_itemsize: int,
    casts: bool,
    received_rows: int,
) -> TransientBytes:
    """The terms of one group.

    reduce_layout:  that of its reduce-scatter: the trainable parameters, and a slot of flags behind them
    num_direct:     how many of the first slots of ``layout`` are gathered directly
    casts:          the parameters are cast before the all-gather (``param_dtype`` is not the storage dtype)
    received_rows:  outputs that the reduce-scatter receives into: W - 2 pairwise, W for an all-to-all, else 0
    """
    packed = layout.slots[num_direct:]
    packed_numel = layout.shard_numel - packed[0].offset if packed else 0
    gather_numel = packed_numel * layout.num_shards + (layout.shard_numel if casts else 0)
    return TransientBytes(
        unsharded=layout.unsharded_numel * param_itemsize,
        gather_buffers=gather_numel * param_itemsize,
        unsharded_grads=sum(slot.cut.numel for slot in reduce_layout.slots[:-1]) * param_itemsize,
        reduce_input=reduce_layout.unsharded_numel * reduce_itemsize,
        reduce_output=reduce_layout.shard_numel * reduce_itemsize,
        reduce_received=received_rows * reduce_layout.shard_numel * reduce_itemsize,
        sharded_grads=reduce_layout.shard_numel * itemsize,
    )


def peak_of_step(
    groups: Sequence[TransientBytes],
    root: TransientBytes,
    *,
    prefetch: bool,
    allocates_early: bool,
    max_reductions: int,
) -> int:
    """The most that forward and backward add to the sharded parameters and optimizer state, activations aside.

    groups:           one group a unit, in the order in which they run; each runs once, is resharded after forward, and its
                      parameters are all trainable and used
    root:             the group of the root, unsharded from the beginning of forward to the end of backward
    prefetch:         while a unit runs, the next one is on its way
    allocates_early:  an all-gather under way has the unsharded storage already (device streams, direct gathers); a packed gather
                      on the host allocates it when it is waited for
    max_reductions:   reduce-scatters that may be under way while the next unit runs; 0 if they are complete when they return

    Where groups are equal (U unsharded, P gather buffers, G unsharded gradients, I and O reduce input and output, R received), the
    peak is the last unit's but one, where nearly all sharded gradients exist:

        root's U and G + the sharded gradients so far + U + (U + P of the prefetched, or P) + G + I + O + R
    """
    moments = [0]
    for index, group in enumerate(groups):
        following = groups[index + 1] if prefetch and index + 1 < len(groups) else None
        moments.append(root.unsharded + group.unsharded + max(group.gather_buffers, _on_its_way(following, allocates_early)))
    kept = root.unsharded + root.unsharded_grads
    handed_out = 0
    reductions: list[TransientBytes] = []
    for index in reversed(range(len(groups))):
        group = groups[index]
        arriving = _on_its_way(groups[index - 1] if prefetch and index > 0 else None, allocates_early)
        reducing = sum(map(_in_reduction, reductions))
        moments.append(kept + handed_out + reducing + group.unsharded + max(group.gather_buffers, arriving + group.unsharded_grads))
        while len(reductions) >= max(max_reductions, 1):
            handed_out += reductions.pop(0).sharded_grads
        reducing = sum(map(_in_reduction, reductions))
        moments.append(kept + handed_out + reducing + arriving + group.unsharded_grads + group.reduce_input)
        moments.append(kept + handed_out + reducing + arriving + _in_reduction(group))
        if max_reductions > 0:
            reductions.append(group)
        else:
            handed_out += group.sharded_grads
    handed_out += sum(group.sharded_grads for group in reductions)
    moments.append(handed_out + root.unsharded_grads + root.reduce_input)
    moments.append(handed_out + _in_reduction(root))
    return max(moments)


def _on_its_way(group: TransientBytes | None, allocates_early: bool) -> int:
    if group is None:
        return 0
    return group.gather_buffers + (group.unsharded if allocates_early else 0)


def _in_reduction(group: TransientBytes) -> int:
    return group.reduce_input + group.reduce_output + group.reduce_received
