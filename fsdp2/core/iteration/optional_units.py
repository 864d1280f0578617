"""Optional units: any rank may leave them out of any forward, and of its backward.

When forward begins, the root gathers them on all ranks. So a rank that runs an optional unit does not communicate then,
and a rank that leaves it out misses nothing. At the end of a forward with a graph, ranks tell each other which calls
they have made, and each rank puts the calls of the others into its own log. All ranks then gather and reduce in
backward in the order of that log (``forward_log.py``). Flags in every reduction say which ranks have gradients. If no
rank has run a unit, backward has no collective for it.

Worked example, units a and b in a root, optional t; rank 0 runs a, t, b, and rank 1 runs a, b

    forward    both: gather root, t, a, b; then all-reduce 16 bytes of a checksum, which differs
    rows       rank 0: t was entered and left after 3 moments of mandatory units (root begins, a begins and ends)
               rank 1: nothing
    log        rank 1 gets a call of t between a and b
    backward   both: gather b, reduce b, gather t, reduce t, gather a, reduce a, reduce root
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...errors import ArgumentError, MeshError, OrderError
from ...torch_names import torch_autograd
from ..comm import collective_log
from ..comm.agreement import all_say, messages_over, tell_later, told_over
from ..group.param_group import GroupState
from .call import Call, GraphPart
from .forward import Forward
from .forward_log import ForwardLog
from .unit import Unit
from .unit_tree import UnitTree


class _Mark(NamedTuple):
    """A call of an optional unit begins or ends in forward.

    gap:   after so many moments of mandatory units
    call:  the gap in which it began, its unit, and how many calls of that unit had begun in that gap before
    """

    gap: int
    call: tuple[int, int, int]
    is_end: bool


class _Row(NamedTuple):
    """A rank's message to the others. marks: in order; with_inputs: the calls with an input that needs a gradient"""

    marks: tuple[_Mark, ...]
    with_inputs: tuple[tuple[int, int, int], ...]


class OptionalUnits:
    """The units under one root that ranks may leave out: declared ones, and those below them."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree
        declared = [unit for unit in tree.units if unit.options.optional]
        modules = {each for unit in declared for module in unit.modules for each in module.modules()}
        self.units = [unit for unit in tree.units if modules.issuperset(unit.modules)]
        self._below: dict[Unit, list[Unit]] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self.units

    def below(self, root: Unit) -> list[Unit]:
        """The optional units below ``root``, with which a forward begins. Raises: OrderError if ``root`` is optional"""
        self._refuse_what_ranks_cannot_leave_out()
        if root in self.units:
            raise OrderError(
                f"forward begins with {root.name}, which is optional",
                expected="forward of a module around it, which all ranks run, as all of them gather it there",
                fix="run it in the forward of the model; or call set_optional(False) on it",
            )
        if root not in self._below:
            modules = {each for module in root.modules for each in module.modules()}
            self._below[root] = [unit for unit in self.units if modules.issuperset(unit.modules)]
        return self._below[root]

    def _refuse_what_ranks_cannot_leave_out(self) -> None:
        """Raise on all ranks, or on none."""
        found = []
        for unit in self.units:
            if any(group.holders is not None for group in unit.uses):
                found.append(f"{unit.name}: parameters that are tied to another module's")
            if unit.max_norm_weights:
                found.append(f"{unit.name}: an embedding with max_norm, whose forward writes its rows")
            if any(group.gradients.options.comm is not None for group in unit.groups):
                found.append(f"{unit.name}: set_custom_reduce_scatter, whose buffers do not say who has gradients")
        for unit in self._tree.units:
            named = [*unit.options.prefetch_forward, *unit.options.prefetch_backward]
            if named and (unit in self.units or not set(named).isdisjoint(self.units)):
                found.append(f"{unit.name}: set_modules_to_forward_prefetch or set_modules_to_backward_prefetch")
        if found:
            raise ArgumentError(
                "ranks cannot leave out these units",
                items=found,
                expected="optional units without these",
                fix="leave them out, or call set_optional(False)",
            )

    # --- what ranks tell each other ---

    def complete(self, log: ForwardLog) -> None:
        """Put the calls that only other ranks have made into ``log``. Collective: yes, over the units' mesh

        Raises: OrderError on all ranks, if two of them ran optional units in opposite orders, or one in a re-entrant
                checkpoint
        """
        meshes = {group.mesh.groups: group.mesh for unit in self.units for group in unit.groups}
        if len(meshes) > 1:
            raise MeshError(
                f"optional units are on {len(meshes)} meshes",
                expected="one mesh for all of them, so that one set of ranks tells each other who runs them",
                fix="shard them over the same mesh",
            )
        messages = None if not meshes else messages_over(*meshes.values())
        if messages is None:
            return
        row, own, mandatory = self._row(log)
        if all_say(row, [(messages, torch.device("cpu"))], "comparison of optional units"):
            return
        rows = tuple(dict.fromkeys(told_over([messages], row).values()))
        merged = _merged(tuple(each.marks for each in rows))
        if merged is None:
            raise OrderError(
                "ranks ran optional units in opposite orders",
                items=[" -> ".join(self.units[mark.call[1]].name for mark in each.marks) for each in rows],
                expected="one order of those that a rank runs, on all ranks",
                fix="run them in the same order on every rank; go on after reset_iter_state()",
            )
        with_inputs = {call for each in rows for call in each.with_inputs}
        new: dict[tuple[int, int, int], Call] = {}
        for mark, at in _times(merged, own, mandatory):
            if mark.call not in new:
                new[mark.call] = call = Call(GraphPart())
                call.log = weakref.ref(log)
                call.is_watched, call.has_inputs = True, mark.call in with_inputs
                log.calls.setdefault(self.units[mark.call[1]], []).append(call)
            if mark.is_end:
                new[mark.call].left = at
            else:
                new[mark.call].entered = at
        for calls in log.calls.values():
            calls.sort(key=lambda call: call.entered)

    def _row(self, log: ForwardLog) -> tuple[_Row, dict[_Mark, float], list[float]]:
        """This rank's row, the times of its marks, and the times of mandatory units' moments."""
        indices = {unit: index for index, unit in enumerate(self.units)}
        moments = [
            (at, indices.get(unit, -1), call, is_end)
            for unit, call in log.in_order()
            if call.is_watched
            for at, is_end in ((call.entered, False), (call.left, True))
        ]
        own: dict[_Mark, float] = {}
        mandatory: list[float] = []
        known: dict[Call, tuple[int, int, int]] = {}
        for at, index, call, is_end in sorted(moments, key=lambda moment: moment[0]):
            if index < 0:
                mandatory.append(at)
                continue
            gap = len(mandatory)
            if not is_end:
                known[call] = (gap, index, sum(each[:2] == (gap, index) for each in known.values()))
            own[_Mark(gap, known[call], is_end)] = at
        with_inputs = tuple(name for call, name in known.items() if call.has_inputs)
        return _Row(tuple(own), with_inputs), own, mandatory


@functools.lru_cache(maxsize=64)
def _merged(rows: tuple[tuple[_Mark, ...], ...]) -> tuple[_Mark, ...] | None:
    """One order of the marks that all ranks' orders agree with; None if two of them contradict each other."""
    result: list[_Mark] = []
    left = [list(reversed(row)) for row in rows]
    behind = [set(row[:-1]) for row in left]  # without the next one
    while any(left):
        heads = [row[-1] for row in left if row]
        gap = min(head.gap for head in heads)
        free = (head for head in heads if head.gap == gap and not any(head in others for others in behind))
        head = next(free, None)
        if head is None:
            return None
        result.append(head)
        for row, others in zip(left, behind, strict=True):
            if row and row[-1] == head:
                row.pop()
                if row:
                    others.discard(row[-1])
    return tuple(result)


def _times(marks: Sequence[_Mark], own: Mapping[_Mark, float], mandatory: Sequence[float]) -> list[tuple[_Mark, float]]:
    """For each of ``marks`` that is not this rank's own, a time: less than 1 after that of the moment before it.

    own: times of this rank's; mandatory: times of mandatory units' moments, which the gaps lie between
    """
    line = [(mark.gap, mark) for mark in marks] + [(gap, None) for gap in range(len(mandatory))]
    at = min([*mandatory[:1], *own.values()], default=0) - 1
    result: list[tuple[_Mark, float]] = []
    for gap, mark in sorted(line, key=lambda each: (each[0], each[1] is None)):
        if mark is None:
            at = mandatory[gap]
        elif mark in own:
            at = own[mark]
        else:
            at += 1 / (len(marks) + 1)
            result.append((mark, at))
    return result


class OptionalForward(Forward):
    """One forward under a root with optional units. These are left out of its record: no rank prefetches them."""

    def __init__(self, tree: UnitTree, root: Unit, log: ForwardLog | None, optional: OptionalUnits) -> None:
        super().__init__(tree, root, log)
        self._units = optional
        self._optional = optional.below(root)
        self._are_gathered = False

    def begin(self, unit: Unit) -> None:
        if unit in self._units:
            self._begin_optional(unit)
            return
        super().begin(unit)
        if not self._are_gathered:
            self._are_gathered = True
            for other in self._optional:
                other.issue()

    def _begin_optional(self, unit: Unit) -> None:
        """Collective: no"""
        if any(group.state is GroupState.SHARDED and group.mesh.shard_size > 1 for group in unit.uses):
            raise OrderError(
                f"{unit.name} is optional, and not gathered: it has run in this forward before, "
                "or the forward began with a module that does not hold it",
                expected="one run in the forward of a module around it, after which it is resharded",
                fix="call set_reshard_after_forward(False) on it, so that it may run several times",
            )
        if self.precedes_backward and not torch.is_grad_enabled() and torch_autograd.in_reentrant_checkpoint():
            problem = OrderError(
                f"{unit.name} is optional, and runs in a re-entrant checkpoint",
                expected="calls that backward can follow: this one makes its graph in backward, on this rank alone",
                fix="checkpoint it with use_reentrant=False, or by apply_activation_checkpointing",
            )
            tell_later(problem)
        log = collective_log.current
        if log is not None:
            log.enter("forward", unit.name)
        unit.issue()  # no collective: what is not gathered is refused above
        unit.wait()
        if log is not None:
            log.resume()

    def end(self, unit: Unit, stays: bool = False) -> None:
        if unit not in self._units:
            super().end(unit, stays)
            return
        log = collective_log.current
        if log is not None:
            log.exit("forward", unit.name)
        if unit.options.reshard_after_forward is True and not stays:
            unit.reshard()
        if log is not None:
            log.resume()

    def finish(self, failed: bool = False) -> None:
        for unit in self._optional:  # on all ranks to the same state, whoever ran it
            unit.wait()
            self._tree.reshard_after_forward(unit)
        super().finish(failed)
        if self.log is not None and not failed:
            self._units.complete(self.log)
