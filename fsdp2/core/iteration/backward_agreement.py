"""Before a backward communicates, all ranks compare their orders of collectives; if they differ, all ranks raise.

Ranks gather and reduce groups one after another, in an order that follows from each rank's own graph. If one rank left
out a unit that the others have, its next group would meet their last one: a hang, or, between groups of equal size,
wrong gradients without an error. So a backward begins with one all-gather of eight bytes: a checksum of what the rank
will do, or -1 if it has a problem to tell (``comm/agreement.py``), which all ranks then raise. Where the checksums
differ, ranks tell each other what they do with each unit.

Ranks may differ in what they do without a collective: how often they call a unit that they need not gather, which
frozen units they call, whether their data need a gradient. If no rank has to gather a unit that some ranks reduce at
the end of backward, all ranks reduce it there. A backward that runs through several roots is compared as a whole when
the first of them begins: a rank that leaves out a root would otherwise not come to compare it. On stream-ordered
backends (NCCL) the host would have to wait for the device to read the answer, so there ranks compare afterwards what
they reduced (``late_comparison.py``).

Worked example, units 0 (the root), 1 and 2, sharded; rank 0 did not call unit 1

    ways     rank 0: LAST, LEFT_OUT, IN_MIDDLE              rank 1: LAST, IN_MIDDLE, IN_MIDDLE
    order    rank 0: gather 2, reduce 2, reduce 0           rank 1: gather 2, reduce 2, gather 1, reduce 1, reduce 0
    both     OrderError: blocks.0: the backward of ranks [0] does not have it; ...
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...errors import OrderError
from ...torch_names import torch_autograd, torch_collectives
from ..comm import backends, collective_log
from ..comm.agreement import agree, agree_over, has_untold, take_untold
from ..group.memory import GroupState
from ..group.param_group import ParamGroup
from .forward_log import ForwardLog
from .peers import peers_on
from .unit import Unit

LEFT_OUT, LAST, IN_MIDDLE, AT_END = range(4)
"""What a backward does with a unit: nothing; reduces it at the end, without gathering it; reduces it when its inputs
have their gradients; gathers it, and reduces it at the end, as no input needs a gradient."""

_SAID = {
    LEFT_OUT: "does not have it",
    LAST: "reduces it last",
    IN_MIDDLE: "reduces it as soon as its inputs have their gradients",
    AT_END: "reduces it last, for none of its inputs needs a gradient",
}

_Ways = dict[tuple[int, int], dict[int, int]]
"""What each rank does, by root and unit."""


@dataclass
class _Part:
    """What a backward does with one root.

    root:   the root
    ways:   what it does with each unit
    timed:  moments of forward, the last of them first in a backward, with a unit that it gathers (True: reduces) there
    last:   the units that it reduces when the graph has run
    lent:   units with groups that other units borrow and that it reduces when the graph has run
    is_reached: it goes through a unit that communicates
    recomputed: for each forward whose recomputation may gather in another order: the calls that it reaches
    """

    root: Agreement
    ways: list[int]
    timed: list[tuple[int, int, bool]]
    last: list[int]
    lent: list[int] = field(default_factory=list)
    is_reached: bool = False
    recomputed: list[list[int]] = field(default_factory=list)


class Agreement:
    """The units of one root that communicate over the same ranks as the first of them, and those ranks.

    Groups over other ranks are not compared: some of those ranks may rightly run a unit that others leave out.

    number: among the roots over the same ranks, by their first backwards that were equal on all ranks; -1 before
    """

    def __init__(self, units: Sequence[Unit], logs: Callable[[], Sequence[ForwardLog]]) -> None:
        """logs: returns those of forwards whose backward may come, in order; none if the root keeps no logs"""
        self.number = -1
        self._all_units = units
        self._logs = logs
        self._has_numbered_groups = False
        self._compared_in = -1  # the backward (id of its graph task) in which it was compared with an earlier root
        mesh = next((unit.groups[0].mesh for unit in units if unit.groups), None)
        groups = () if mesh is None else (mesh.shard_group, mesh.replicate_group)
        self._process_groups = [group for group in groups if group is not None and group.size() > 1]
        names = [backends.backend_of(group, mesh.device_type) for group in self._process_groups if mesh is not None]
        if any(backends.is_stream_ordered(name) or not backends.moves_data(name) for name in names):
            self._process_groups = []
        if mesh is None or not self._process_groups:
            return
        uses = {unit: [group for group in unit.uses if group.mesh.ranks == mesh.ranks] for unit in units}
        self._uses = {unit: groups for unit, groups in uses.items() if groups}
        self._units = list(self._uses)
        # A group that other units borrow is reduced at the end of backward, whichever of its units that reached.
        own = {unit: [group for group in unit.groups if group in self._uses[unit]] for unit in self._units}
        self._own = {unit: [group for group in groups if group.holders is None] for unit, groups in own.items()}
        self._lent = {unit: [group for group in groups if group.holders is not None] for unit, groups in own.items()}
        lent = [group for groups in self._lent.values() for group in groups]
        self._users = {group: [unit for unit in self._units if group in self._uses[unit]] for group in lent}
        self._below: dict[Unit, list[ParamGroup]] = {}
        self._peers = peers_on(mesh)
        self._peers.roots.add(self)

    def retire(self) -> None:
        """Stop comparing: another root has taken over the units."""
        if self._process_groups:
            self._peers.roots.discard(self)

    def number_groups(self) -> None:
        """Number the groups in the first backward that reduces, in which all ranks take part."""
        if not self._has_numbered_groups and any(_reduces(unit, unit.groups) for unit in self._all_units):
            self._has_numbered_groups = True
            for unit in self._all_units:
                for group in unit.groups:
                    peers_on(group.mesh).number(group)

    def check(self) -> None:
        """Raise OrderError on all ranks if one of them communicates in another order in this backward, just begun.

        Collective: yes, over the shard axis, then the replicate axis; no if the root communicates nothing, was compared
                    with an earlier root, or is the only root that these ranks compared, of one unit without files
        Raises:     also problems from ``tell_later``: on all ranks, or, if ranks compare nothing, on this rank
        """
        self.number_groups()  # for the tags, by which ranks compare afterwards
        if not self._process_groups:
            self._raise_alone()
            return
        task = torch_autograd.current_graph_task()
        if self._compared_in == task or not any(
            self._communicates(each) or self._is_sharded(each) for each in self._units
        ):
            return
        parts = [self._part(is_first=True)]
        for other in self._peers.roots:
            part = parts[0] if other is self else other._part()
            if part.is_reached and other is not self:
                parts.append(part)
                other._compared_in = task
        before = self._peers.num_roots
        new = sorted((part.root for part in parts if part.root.number < 0), key=lambda each: each._first_moment(task))
        # Another rank's backward may go through a root that this rank's does not reach, or that is gone on this rank.
        if not (new or len(self._units) > 1 or len(parts) > 1 or before > 1 or self._has_files()):
            self._raise_alone()
            return
        for number, root in enumerate(new, start=before):
            root.number = number
        parts.sort(key=lambda part: (part.root is not self, part.root.number))
        try:
            if not self._have_one_order(parts):
                axes = [(group, torch.device("cpu")) for group in self._process_groups]
                agree_over(axes, None)  # raises what ranks were to tell
                self._join_or_refuse(parts)
        except BaseException:
            for root in new:
                root.number = -1
            raise
        self._peers.num_roots += len(new)

    def _first_moment(self, task: int) -> int:
        """When the forward of this root, which the backward ``task`` reaches, began."""
        calls = [call for unit in self._units for call in unit.calls.awaiting if call.will_pass_inputs(task)]
        return min((call.entered for call in calls), default=-1)

    @staticmethod
    def _raise_alone() -> None:
        """What this rank was to tell later, here, where ranks do not compare anything."""
        problem = take_untold()
        if problem is not None:
            raise problem

    def _has_files(self) -> bool:
        return any(group.options.folder is not None for groups in self._uses.values() for group in groups)

    def _have_one_order(self, parts: Sequence[_Part]) -> bool:
        """Whether all ranks communicate in the order of ``parts``, and none has a problem to tell. Collective: yes."""
        numbered = [(part.root.number if len(parts) > 1 else 0, part) for part in parts]
        timed = sorted(((at, number, *what) for number, part in numbered for at, *what in part.timed), reverse=True)
        order = [what for _, *what in timed]
        order += [[number, index, True] for number, part in numbered for index in reversed(part.last)]
        lent = [(number, part.lent) for number, part in numbered if part.lent]
        recomputed = [part.recomputed for part in parts if part.recomputed]
        checksum = zlib.crc32(repr((order, lent, recomputed)).encode())
        found = torch.tensor([-1 if has_untold() else checksum], device="cpu")
        for group in self._process_groups:
            gathered = found.new_empty(group.size() * found.numel())
            with collective_log.during("comparison of ranks before backward", group, found):
                if backends.is_stock_alone():  # a tool counts all-gathers: let this be an all-reduce
                    gathered.zero_().view(group.size(), -1)[group.rank()] = found
                    dist.all_reduce(gathered, group=group)
                else:
                    torch_collectives.all_gather_single(gathered, found, group, async_op=False)
            found = gathered
        first, *others = found.tolist()
        return first >= 0 and all(other == first for other in others)

    def _join_or_refuse(self, parts: Sequence[_Part]) -> None:
        """Reduce at the end what this rank leaves out, if that makes the orders equal; else raise. Collective: yes."""
        first_roots, ways = self._gather_ways(parts)
        # Those ranks may run no backward through the other root, so there would be no end at which to reduce it.
        joined = []
        if len(first_roots) == 1:
            joined = [
                index
                for root, index in sorted(ways)
                if root == self.number and self._can_join(index, set(ways[root, index].values()))
            ]
        left_out = [index for index in joined if parts[0].ways[index] == LEFT_OUT]
        parts[0].last = sorted([*parts[0].last, *left_out])
        if not joined or not self._have_one_order(parts):
            self._refuse(ways, recompute=any(part.recomputed for part in parts))
        for index in left_out:
            for group in (*self._own[self._units[index]], *self._lent[self._units[index]]):
                group.gradients.reached = True

    def _part(self, is_first: bool = False) -> _Part:
        """What the backward that has just begun does with this root. is_first: no other root is reached earlier"""
        part = _Part(self, [], [], [])
        used: set[ParamGroup] = set()
        all_logs = self._logs()
        logs = [log for log in all_logs if log.is_in_this_backward()] or (all_logs[-1:] if is_first else [])
        differ = [log for log in logs if log.gathers_in_other_order(lambda unit: not self._is_resident(unit))]
        part.recomputed = [log.reached() for log in differ]
        for index, unit in enumerate(self._units):
            if not self._communicates(unit) and all(group.holders is None for group in self._uses[unit]):
                part.ways.append(LEFT_OUT)
                continue
            way, begins, ends = _in_logs(unit, logs) if all_logs else self._in_graph(unit)
            part.is_reached |= bool(begins)
            if begins:
                used.update(self._uses[unit])
            if way == IN_MIDDLE and unit.calls.to_rerun:
                way = AT_END
            own = self._own[unit]
            if way == LEFT_OUT and any(group.gradients.is_due for group in own):
                way = LAST
            if not self._is_resident(unit):
                part.timed += [(at, index, False) for at in begins]
            elif way == AT_END:
                way = LAST
            part.ways.append(way)
            if way == IN_MIDDLE and _reduces(unit, own):
                part.timed.append((min(ends), index, True))
            elif way != LEFT_OUT and _reduces(unit, own):
                part.last.append(index)
        self._add_lent(part, used)
        return part

    def _add_lent(self, part: _Part, used: set[ParamGroup]) -> None:
        """Add the lent groups that are reduced when the graph has run. used: groups of the units that it reaches"""
        for index, unit in enumerate(self._units):
            lent = self._lent[unit]
            is_reduced = _reduces(unit, lent) and any(group in used or group.gradients.is_due for group in lent)
            if self._own[unit]:
                if is_reduced:
                    part.lent.append(index)
            elif lent:
                part.ways[index] = LAST if is_reduced else LEFT_OUT
                if is_reduced:
                    part.last.append(index)
        part.last.sort()

    def _gather_ways(self, parts: Sequence[_Part]) -> tuple[set[int], _Ways]:
        """Which root comes first in each rank's backward, and what each rank does with each unit. Collective: yes."""
        mine = {(part.root.number, index): way for part in parts for index, way in enumerate(part.ways)}
        said = [(dist.get_rank(), self.number, mine)]
        for group in self._process_groups:
            said = [each for of_rank in agree(group, None, said) for each in of_rank]
        ways: _Ways = {}
        for rank, _, of_rank in said:
            for key, way in of_rank.items():
                ways.setdefault(key, {each: LEFT_OUT for each, *_ in said})[rank] = way
        return {first for _, first, _ in said}, ways

    def _can_join(self, index: int, ways: set[int]) -> bool:
        """Whether those ranks that leave out a unit can reduce it with the others, at the end of backward."""
        unit = self._units[index]
        # A custom communicator's buffers have no flags of the parameters that a rank did not use.
        is_told = all(group.gradients.options.comm is None for group in unit.groups)
        groups = self._own[unit] or self._lent[unit]
        is_all = not (self._own[unit] and self._lent[unit])  # with both, a rank may reduce one kind alone
        return ways == {LEFT_OUT, LAST} and is_all and is_told and _reduces(unit, groups) and self._is_resident(unit)

    def _communicates(self, unit: Unit) -> bool:
        return _reduces(unit, self._own[unit]) or _reduces(unit, self._lent[unit]) or not self._is_resident(unit)

    def _is_sharded(self, unit: Unit) -> bool:
        """Equal on all ranks, so that it may decide whether they compare, unlike which graphs are alive on a rank."""
        return any(
            group.state is GroupState.SHARDED and group.mesh.shard_size > 1 for group in self._uses.get(unit, unit.uses)
        )

    def _is_resident(self, unit: Unit) -> bool:
        """Whether the unit is unsharded when backward begins, so that ranks can differ only in its reductions."""
        return self._keeps(unit) or all(
            group.mesh.shard_size == 1 or any(map(self._keeps, self._users.get(group, ())))
            for group in self._uses.get(unit, unit.uses)
        )

    def _keeps(self, unit: Unit) -> bool:
        options = unit.options
        if options.reshard_after_forward is False or (options.reshard_is_default and unit is self._all_units[0]):
            # An earlier backward through the same graph may have resharded it.
            is_there = all(group.state is not GroupState.SHARDED for group in unit.uses)
            return is_there or not any(call.may_have_backward() for call in unit.calls.awaiting)
        return False

    def _in_graph(self, unit: Unit) -> tuple[int, list[int], list[int]]:
        """What this backward does with ``unit``, and at which moments of forward it begins and ends with its calls."""
        task = torch_autograd.current_graph_task()
        calls = [call for call in unit.calls.awaiting if call.will_pass_inputs(task)]
        opened = [call.left for call in calls if not call.graph()]
        begins = [call.left for call in calls if call.graph()]
        ends = [call.entered for call in calls if call.graph()]
        if not opened:
            return IN_MIDDLE if ends else LEFT_OUT, begins, ends
        if not ends and not self._gives_gradients(unit):
            return LEFT_OUT, [], []
        # Only some of them may be in this backward, and the user may keep the graph of an evaluation.
        return AT_END, [*begins, min(opened)], ends

    def _gives_gradients(self, unit: Unit) -> bool:
        """Whether parameters in its modules' trees get gradients: then a loss uses a call whose inputs need none."""
        below = self._below.get(unit)
        if below is None:
            modules = {each for module in unit.modules for each in module.modules()}
            units = [other for other in self._all_units if not modules.isdisjoint(other.modules)]
            below = self._below[unit] = list(dict.fromkeys(group for other in units for group in other.uses))
        return any(
            torch_autograd.leaf_gets_gradient_in_this_backward(param.unsharded)
            for group in below
            for param in group.params
            if param.unsharded is not None and param.unsharded.requires_grad
        )

    def _name_of(self, index: int, has_others: bool) -> str:
        unit = self._units[index]
        root = f"the root {type(self._all_units[0].modules[0]).__name__}" if has_others else "the root"
        return f"{unit.fqn} of {root}" if unit.fqn and has_others else unit.fqn or root

    def _refuse(self, ways: _Ways, recompute: bool) -> None:
        roots = {each.number: each for each in self._peers.roots} | {self.number: self}
        has_others = len({root for root, _ in ways}) > 1
        items = []
        for (root, index), each in sorted(ways.items()):
            ranks: dict[int, list[int]] = {}
            for rank, way in each.items():
                ranks.setdefault(way, []).append(rank)
            if len(ranks) > 1:
                said = [f"the backward of ranks {sorted(each)} {_SAID[way]}" for way, each in sorted(ranks.items())]
                name = roots[root]._name_of(index, has_others) if root in roots else "a root that this rank has not run"
                items.append(f"{name}: {'; '.join(said)}")
        if recompute and not items:
            raise OrderError(
                "the losses of ranks make them recompute different checkpointed segments, of several units each",
                expected="each segment to be of one unit, where losses ignore outputs: "
                "no rank knows in which order others gather",
                fix="checkpoint each unit by itself; go on after reset_iter_state()",
            )
        raise OrderError(
            f"{len(items)} units are not in the same backward on all ranks"
            if items
            else "ranks ran units in different orders",
            items=items,
            expected="forward to call the same units in the same order on every rank, "
            "and each loss to use what they return",
            fix="make one group of the module around those that some ranks leave out (wrap=None: the whole model), "
            "or, if only the losses differ, call set_reduce_scatter_unused_params(True) on the root; "
            "go on after reset_iter_state()",
        )


def _reduces(unit: Unit, groups: Sequence[ParamGroup]) -> bool:
    return unit.micro_batch.reduces and any(param.sharded.requires_grad for group in groups for param in group.params)


def _in_logs(unit: Unit, logs: Sequence[ForwardLog]) -> tuple[int, list[int], list[int]]:
    """As ``Agreement._in_graph``, where all ranks do what is in the logs."""
    calls = [call for log in logs for call in log.calls.get(unit, ()) if call.is_watched]
    begins = [call.left for call in calls]
    ends = [call.entered for call in calls if call.has_inputs]
    if not begins:
        return LEFT_OUT, [], []
    return IN_MIDDLE if len(ends) == len(begins) else AT_END, begins, ends
