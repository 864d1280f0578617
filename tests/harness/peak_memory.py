"""The most memory that a step needs at any moment, as a sum over its groups. Tests compare the formula with real steps.

This file takes layouts and sizes, in integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2.core.iteration.unit import PrefetchDepth
from fsdp2.core.plan.layout import GroupLayout


@dataclass(frozen=True, slots=True)
class TransientBytes:
    """What one group adds to the sharded parameters and optimizer state in one step, in bytes: the terms of the peak-memory sum.

    unsharded:        its unsharded storage
    gather_buffers:   packed all-gather output, alive from issue to copy-out; shards are cast into it, or into the unsharded storage
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
    received_rows: int,
) -> TransientBytes:
    """The terms of one group.

    reduce_layout:  the layout of its reduce-scatter: the trainable parameters, and a slot of flags behind them
    num_direct:     how many of the first slots of ``layout`` are gathered directly
    received_rows:  outputs that the reduce-scatter receives into: W - 2 pairwise, W for an all-to-all, else 0
    """
    packed = layout.slots[num_direct:]
    packed_numel = layout.shard_numel - packed[0].offset if packed else 0
    gather_numel = packed_numel * layout.num_shards
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
    prefetch: PrefetchDepth,
    allocates_early: bool,
    max_reductions: int,
    casts_early: bool = False,
) -> int:
    """The most that forward and backward add to the sharded parameters and optimizer state, without activations.

    groups:           one group a unit, in the order in which they run; each runs once, is resharded after forward, and its
                      parameters are all trainable and used
    root:             the group of the root, unsharded from the beginning of forward to the end of backward
    prefetch:         how many units are on their way while one runs
    allocates_early:  an all-gather under way has the unsharded storage already (device streams, direct gathers); a packed gather
                      on the host allocates it when it is waited for
    max_reductions:   reduce-scatters that may be under way while the next unit runs; 0 if they are complete when they return
    casts_early:      device streams: all of a reduction is queued when it starts, so the cast of its output exists while its input
                      does; the host makes the cast when it has waited for the reduction and freed the input

    Where groups are equal (U unsharded, P gather buffers, G unsharded gradients, I and O reduce input and output, R received), the
    peak comes in the backward of the second unit, when nearly all sharded gradients exist:

        root's U and G + the sharded gradients so far + U + (U + P of each that is prefetched, or P) + G + I + O + R
    """
    moments = [0]
    arrived_before = _on_their_way(groups, prefetch, allocates_early, but_first=True)  # the root comes first, and prefetches
    for index, group in enumerate(groups):
        following = groups[index + 1 :]
        arriving = _on_their_way(following, prefetch, allocates_early)
        moments.append(root.unsharded + group.unsharded + max(group.gather_buffers + arrived_before, arriving))
        arrived_before = _on_their_way(following, prefetch, allocates_early, but_first=True)
    kept = root.unsharded + root.unsharded_grads
    handed_out = 0
    reductions: list[TransientBytes] = []
    arrived_before = _on_their_way(groups[::-1], prefetch, allocates_early, but_first=True)
    for index in reversed(range(len(groups))):
        group, following = groups[index], groups[:index][::-1]
        arriving = _on_their_way(following, prefetch, allocates_early)
        reducing = sum(_in_flight(each, casts_early) for each in reductions)
        gathered = max(group.gather_buffers + arrived_before, arriving + group.unsharded_grads)
        moments.append(kept + handed_out + reducing + group.unsharded + gathered)
        arrived_before = _on_their_way(following, prefetch, allocates_early, but_first=True)
        while len(reductions) >= max(max_reductions, 1):
            handed_out += reductions.pop(0).sharded_grads
        reducing = sum(_in_flight(each, casts_early) for each in reductions)
        moments.append(kept + handed_out + reducing + arriving + group.unsharded_grads + group.reduce_input)
        moments.append(kept + handed_out + reducing + arriving + _in_reduction(group, casts_early))
        if max_reductions > 0:
            reductions.append(group)
        else:
            handed_out += group.sharded_grads
    handed_out += sum(group.sharded_grads for group in reductions)
    moments.append(handed_out + root.unsharded_grads + root.reduce_input)
    moments.append(handed_out + _in_reduction(root, casts_early))
    return max(moments)


def _on_their_way(following: Sequence[TransientBytes], prefetch: PrefetchDepth, early: bool, but_first: bool = False) -> int:
    """The bytes of the units that come next, in their order; ``but_first``: without the first, whose turn it is."""
    reach = prefetch.reach(group.unsharded for group in following)
    return sum(group.gather_buffers + (group.unsharded if early else 0) for group in following[int(but_first) : reach])


def _in_reduction(group: TransientBytes, casts_early: bool) -> int:
    """From the reduce-scatter on, until its output has been cast."""
    cast = group.sharded_grads if casts_early and group.sharded_grads != group.reduce_output else 0
    return group.reduce_input + group.reduce_output + group.reduce_received + cast


def _in_flight(group: TransientBytes, casts_early: bool) -> int:
    """While the next unit runs: a reduction that has been cast has freed its output."""
    return group.reduce_input + group.reduce_received + (group.sharded_grads if casts_early else group.reduce_output)
