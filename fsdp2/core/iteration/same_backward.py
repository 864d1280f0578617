"""Before a backward communicates, all ranks compare in which order it will: where they differ, all of them raise.

Groups are gathered and reduced one after another, in an order that follows from each rank's own graph. If one rank left out a unit that
the others have, its next group would meet their last one: a hang, or, between groups of equal size, gradients of other parameters in
silence. So the first moment of a backward costs one all-gather of one byte a unit. What a rank does without a collective is its own:
how often it calls a unit that it need not gather, which frozen units it calls, whether its data need a gradient. A unit that some ranks
reduce at the end of backward is reduced there by all, if nobody has to gather it. On stream-ordered backends (NCCL) the host would have
to wait for the device to read the answer, so there nothing is compared. This file refuses to know when a backward begins and what is
communicated in it.

Worked example, units 0 (the root), 1 and 2, sharded; rank 0 did not call unit 1

    ways     rank 0: LAST, LEFT_OUT, IN_MIDDLE              rank 1: LAST, IN_MIDDLE, IN_MIDDLE
    order    rank 0: gather 2, reduce 2, reduce 0           rank 1: gather 2, reduce 2, gather 1, reduce 1, reduce 0
    both     OrderError: blocks.0: the backward of ranks [0] does not have it; ...
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import OrderError, message
from .. import torch_compat as compat
from ..comm import collectives
from ..group.param_group import ParamGroup
from .forward_log import ForwardLog
from .unit import Unit

LEFT_OUT, LAST, IN_MIDDLE, AT_END = range(4)
"""What a backward does with a unit: nothing; it reduces the unit at the end, without gathering it; it reduces the unit when its inputs
have their gradients; or it may gather the unit, and reduces it at the end, since no input needs a gradient."""

_SAID = {
    LEFT_OUT: "does not have it",
    LAST: "reduces it last",
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
        self._all_units = units
        self._below: dict[Unit, list[ParamGroup]] = {}
        self.is_needed = bool(self._process_groups) and len(self._units) > 1

    def check(self, logs: Sequence[ForwardLog]) -> None:
        """Raise OrderError on every rank if this backward, which has just begun, communicates in another order on one of them.

        logs: of forwards whose backward may come, in order, if ranks may leave parts of them out of their backward
        Collective: yes, over the shard axis, then the replicate axis, unless nobody communicates in this backward.
        """
        if not any(self._communicates(unit) for unit in self._units):
            return
        ways, middle, last = self._expected([log for log in logs if log.is_in_this_backward()] or logs[-1:])
        rows = self._gather_rows(ways, middle, last)
        if _have_one_order(rows):
            return
        # All ranks have seen the same rows, so all of them come here.
        joined = [index for index in range(len(ways)) if self._can_join(index, {row[8 + index] for row in rows})]
        left_out = [index for index in joined if ways[index] == LEFT_OUT]
        if not joined or not _have_one_order(self._gather_rows(ways, middle, sorted(last + left_out))):
            self._refuse(rows)
        for index in left_out:
            for group in self._units[index].groups:
                group.gradients.reached = True

    def _expected(self, logs: Sequence[ForwardLog]) -> tuple[list[int], list[tuple[int, bool]], list[int]]:
        """What this backward does with each unit; in which order it gathers and (True) reduces units; which it reduces last."""
        ways = []
        timed: list[tuple[Any, int, bool]] = []
        last = []
        for index, unit in enumerate(self._units):
            if not self._communicates(unit):
                ways.append(LEFT_OUT)
                continue
            way, begins, ends = _in_logs(unit, logs) if logs else self._in_graph(unit)
            if way == LEFT_OUT and any(group.gradients.is_due for group in unit.groups):
                way = LAST
            if not self._is_resident(unit):
                timed += [(moment, index, False) for moment in begins]
            elif way == AT_END:
                way = LAST
            ways.append(way)
            if way == IN_MIDDLE and _reduces(unit):
                timed.append((min(ends), index, True))
            elif way != LEFT_OUT and _reduces(unit):
                last.append(index)
        timed.sort(reverse=True)  # the engine goes back through forward
        return ways, [(index, reduces) for _, index, reduces in timed], last

    def _gather_rows(self, ways: list[int], middle: list[tuple[int, bool]], last: list[int]) -> list[list[int]]:
        """Of each rank: its number, a checksum of the order of its collectives, and what it does with each unit. Collective: yes."""
        order = middle + [(index, True) for index in reversed(last)]
        header = [*dist.get_rank().to_bytes(4, "big"), *zlib.crc32(repr(order).encode()).to_bytes(4, "big")]
        rows: list[list[int]] = self._gather(torch.tensor(header + ways, dtype=torch.uint8)).tolist()
        return rows

    def _can_join(self, index: int, ways: set[int]) -> bool:
        """Whether those ranks that leave out a unit can reduce it with the others, at the end of backward."""
        unit = self._units[index]
        # A custom communicator is not told which parameters a rank did not use.
        is_told = all(group.gradients.options.comm is None for group in unit.groups)
        return ways == {LEFT_OUT, LAST} and is_told and _reduces(unit) and self._is_resident(unit)

    def _communicates(self, unit: Unit) -> bool:
        return _reduces(unit) or not self._is_resident(unit)

    def _is_resident(self, unit: Unit) -> bool:
        """Whether its parameters are there when backward begins, so that only reductions tell its ranks apart."""
        if unit.reshard_after_forward is False or (unit.reshard_is_default and unit is self._all_units[0]):
            return True
        return all(group.mesh.shard_size == 1 for group in unit.groups)

    def _in_graph(self, unit: Unit) -> tuple[int, list[int], list[int]]:
        """What this backward does with ``unit``, and at which moments of forward it begins and ends with its calls."""
        begins, ends, opened = [], [], []
        task = compat.current_graph_task()
        for reference in unit.calls:
            call = reference()
            if call is None or not call.will_pass_inputs(task):  # None: its graph is gone
                continue
            if not call.nodes:
                opened.append(call.left)
            else:
                begins.append(call.left)
                ends.append(call.entered)
        if not opened:
            return IN_MIDDLE if ends else LEFT_OUT, begins, ends
        if not ends and not self._gives_gradients(unit):
            return LEFT_OUT, [], []
        # Only one of them may be in this backward, and the user may keep the graph of an evaluation.
        return AT_END, [*begins, min(opened)], ends

    def _gives_gradients(self, unit: Unit) -> bool:
        """Whether parameters in its modules' trees get gradients: so it is seen that a loss uses a call whose inputs need none."""
        below = self._below.get(unit)
        if below is None:
            modules = {each for module in unit.modules for each in module.modules()}
            units = [other for other in self._all_units if not modules.isdisjoint(other.modules)]
            below = self._below[unit] = list(dict.fromkeys(group for other in units for group in other.uses))
        return any(
            compat.leaf_gets_gradient_in_this_backward(param.unsharded)
            for group in below
            for param in group.params
            if param.unsharded is not None and param.unsharded.requires_grad
        )

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


def _have_one_order(rows: list[list[int]]) -> bool:
    return all(row[4:8] == rows[0][4:8] for row in rows)


def _reduces(unit: Unit) -> bool:
    return unit.micro_batch.reduces and any(param.sharded.requires_grad for group in unit.groups for param in group.params)


def _in_logs(unit: Unit, logs: Sequence[ForwardLog]) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    """As ``Agreement._in_graph``; a moment is the number of a log and a place there."""
    visits = [visit for log in logs for visit in log.visits.get(unit, ())]
    begins = [(visit.log, visit.begin_at) for visit in visits if visit.begin_at is not None]
    ends = [(visit.log, visit.end_at) for visit in visits if visit.has_end()]
    if not begins:
        return LEFT_OUT, [], []
    return IN_MIDDLE if len(ends) == len(begins) else AT_END, begins, ends
