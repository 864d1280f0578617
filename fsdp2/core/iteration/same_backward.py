"""Before a backward communicates, all ranks compare which units it will reach: where they differ, all of them raise.

Groups are reduced one after another, in an order that follows from each rank's own graph. If one rank left out a unit that the others
have, its next group would meet their last one: a hang, or, between groups of equal size, gradients of other parameters in silence.
So the first moment of a backward costs one all-gather of one byte a unit. On stream-ordered backends (NCCL) the host would have to wait
for the device to read the answer, so there nothing is compared. This file refuses to know when a backward begins and what is
communicated in it.

Worked example, units 0 (the root), 1 and 2, sharded; rank 0 did not call unit 1

    ways     rank 0: AT_END, LEFT_OUT, IN_MIDDLE     rank 1: AT_END, IN_MIDDLE, IN_MIDDLE
    both     OrderError: blocks.0: in the backward of ranks [1], not of ranks [0]
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ...errors import OrderError, message
from .. import torch_compat as compat
from ..comm import collectives
from .forward_log import ForwardLog
from .unit import Unit

LEFT_OUT, KEPT, IN_MIDDLE, AT_END = range(4)
"""What a backward does with a unit: nothing; it reduces what earlier ones added up; it reduces the unit when its inputs have their
gradients; or at the end, since no input needs one."""

_SAID = {
    LEFT_OUT: "does not have it",
    KEPT: "reduces only what accumulated before",
    IN_MIDDLE: "reduces it as soon as its inputs have their gradients",
    AT_END: "reduces it last, for none of its inputs needs a gradient",
}


class Agreement:
    """The units of one root that communicate over the same ranks as the first of them, and those ranks."""

    def __init__(self, units: Sequence[Unit]) -> None:
        first = next((unit.groups[0].mesh for unit in units if unit.groups), None)
        groups = () if first is None else (first.shard_group, first.replicate_group)
        self._process_groups = [group for group in groups if group is not None and group.size() > 1]
        if any(collectives.is_stream_ordered(dist.get_backend(group)) for group in self._process_groups):
            self._process_groups = []
        # A group that other units borrow is reduced at the end of backward, whichever of them it reached.
        self._units = [
            unit
            for unit in units
            if first is not None
            and unit.groups
            and all(group.mesh.groups == first.groups and group.holders is None for group in unit.groups)
        ]
        self._index = {unit: index for index, unit in enumerate(self._units)}
        self.is_needed = bool(self._process_groups) and len(self._units) > 1

    def check(self, order: Iterable[Unit], log: ForwardLog | None) -> None:
        """Raise OrderError on every rank if this backward, which has just begun, reaches other units on one of them.

        order: in which units ran forward; log: of the last forward, if ranks may leave parts of it out of their backward
        Collective: yes, over the shard axis, then the replicate axis, unless nobody communicates in this backward.
        """
        if not any(_communicates(unit) for unit in self._units):
            return
        ways = [_way(unit) if log is None else _way_in(log, unit) for unit in self._units]
        if log is None:
            last = dict.fromkeys(reversed([self._index[unit] for unit in order if unit in self._index]))
            moments = [(index, True) for index in last if ways[index] >= IN_MIDDLE]
        else:
            seen = (moment for moment in log.moments if moment is not None)
            moments = [(self._index[visit.unit], is_end) for visit, is_end in seen if visit.unit in self._index]
        header = [*dist.get_rank().to_bytes(4, "big"), *zlib.crc32(repr(moments).encode()).to_bytes(4, "big")]
        mine = torch.tensor(header + ways, dtype=torch.uint8)
        rows = self._gather(mine)
        if not torch.equal(rows[:, 4:], mine[4:].expand(len(rows), -1)):
            self._refuse(rows.tolist())

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        found = mine
        for group in self._process_groups:
            gathered = found.new_empty(group.size() * found.numel())
            compat.all_gather_single(gathered, found, group, async_op=False)
            found = gathered
        return found.view(-1, mine.numel())

    def _refuse(self, rows: list[list[int]]) -> None:
        items = []
        for index, unit in enumerate(self._units):
            ranks: dict[int, list[int]] = {}
            for row in rows:
                ranks.setdefault(row[8 + index], []).append(int.from_bytes(bytes(row[:4]), "big"))
            if len(ranks) > 1:
                said = [f"the backward of ranks {sorted(each)} {_SAID[way]}" for way, each in sorted(ranks.items())]
                items.append(f"{unit.fqn or 'the root'}: {'; '.join(said)}")
        raise OrderError(
            message(
                f"{len(items)} units are not in the same backward on all ranks" if items else "ranks ran units in different orders",
                items=items,
                expected="forward to call the same units in the same order on every rank, and each loss to use what they return",
                fix="make one group of what encloses modules that some ranks leave out (wrap=None: the whole model), or, if only the"
                " losses differ, call set_reduce_scatter_unused_params(True) on the root; go on after reset_iter_state()",
            )
        )


def _communicates(unit: Unit) -> bool:
    return unit.reduces() or not _is_resident(unit)


def _is_resident(unit: Unit) -> bool:
    """Whether its parameters are there when backward begins, so that only reductions tell its ranks apart."""
    return unit.reshard_after_forward is False or all(group.mesh.shard_size == 1 for group in unit.groups)


def _way(unit: Unit) -> int:
    way, task = LEFT_OUT, compat.current_graph_task()
    for reference in unit.calls:
        call = reference()
        if call is None:  # its graph is gone
            continue
        if call.will_pass_inputs(task):
            if not call.nodes:
                way = AT_END
                break
            way = IN_MIDDLE
    if way is LEFT_OUT and unit.micro_batch.reduces and any(group.gradients.holds_unreduced for group in unit.groups):
        return KEPT
    return KEPT if way is AT_END and _is_resident(unit) else way  # both are reduced last


def _way_in(log: ForwardLog, unit: Unit) -> int:
    visits = [visit for visit in log.visits.get(unit, ()) if visit.begin_at is not None]
    if not visits:
        return LEFT_OUT
    return IN_MIDDLE if all(visit.has_inputs for visit in visits) else AT_END
