"""Before a backward communicates, all ranks compare their orders of collectives; if they differ, all ranks raise.

Ranks gather and reduce groups one after another, in an order that follows from each rank's own graph. If one rank left
out a unit that the others have, its next group would meet their last one: a hang, or, between groups of equal size,
wrong gradients without an error. So a backward begins with an all-reduce of a checksum of what this rank will do. If
checksums differ, or a rank has a problem to tell (``comm/agreement.py``), each rank tells the others its whole order.

The order has only what needs a collective. So ranks may differ in how often they call a unit that they need not gather,
in which frozen units they call, and in whether their data need a gradient. If ranks differ only in which groups they
reduce at the end, when the graph has run, all ranks reduce these groups then. A backward that runs through several
roots is compared as a whole when the first of them begins, because a rank that leaves out a root would not come to a
comparison of that root. On stream-ordered backends (NCCL) the host would have to wait for the device to read the
answer, so there ranks compare afterwards what they reduced (``late_comparison.py``).

Worked example, units 0 (the root), 1 and 2 of one group each, sharded; rank 0 did not call unit 1

    rank 0    gather 2, reduce 2; at the end reduce 0
    rank 1    gather 2, reduce 2, gather 1, reduce 1; at the end reduce 0
    both      OrderError: blocks.0: the backward of ranks [0] does not have it; ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ...errors import OrderError
from ...torch_names import torch_autograd
from ..comm import backends
from ..comm.agreement import agree_over, all_say, groups_of, has_untold, told_over
from ..group.param import ShardedParam
from ..group.param_group import GroupState, ParamGroup
from .call import Call
from .forward_log import ForwardLog
from .late_comparison import EXPECTED, FIX, peers_on
from .unit import Unit

_Key = tuple[int, int, int]
"""The number of a root, the index of a unit, and the place of one of its groups, or ``GATHER``."""

GATHER = -1
"""In the place of a group: the unit's groups are gathered."""

_SAID = (
    "does not have it",
    "reduces it last",
    "reduces it as soon as its inputs have their gradients",
    "reduces it last, for none of its inputs needs a gradient",
)


class _Way(NamedTuple):
    """A backward's way through one root.

    calls: the calls that it reaches, by the indices of their units; only of units that communicate
    logs:  of the forwards that it reaches; None if the root keeps no logs
    began: when forward began with the first of the calls; -1 without calls
    left:  when forward ended with the last of them: a backward reaches the root that forward left last first
    """

    root: Agreement
    calls: dict[int, list[Call]]
    logs: list[ForwardLog] | None
    began: float
    left: float


class _Order(NamedTuple):
    """What a rank's backward does with all roots, group by group, or with a unit's groups by ``GATHER``.

    frozen:     for each group that it may reduce, the places of the parameters that are not trained
    roots:      in the order in which it reaches and ends them
    in_graph:   while the graph runs, in this order
    at_end:     reduced when the graph has run
    recomputed: for each forward whose recomputation may gather in another order, the calls that it reaches
    """

    frozen: dict[_Key, tuple[int, ...]]
    roots: list[int]
    in_graph: list[_Key]
    at_end: list[_Key]
    recomputed: list[list[int]]

    def with_ends(self, ends: Iterable[_Key] = ()) -> object:
        """What must be equal on all ranks, if this rank also reduces at the end those of ``ends`` that it left out."""
        at_end = {*self.at_end, *ends}.difference(self.in_graph)
        place = {root: index for index, root in enumerate(self.roots)}
        at_end_in_order = sorted(at_end, key=lambda key: (place.get(key[0], len(place)), key[0], -key[1], -key[2]))
        order = [*self.in_graph, *at_end_in_order]
        return order, [self.frozen.get(key) for key in order], self.recomputed

    def way_of(self, key: _Key) -> int:
        """What it does with ``key``: the place of a text in ``_SAID``."""
        if key in self.in_graph:
            return 2
        return 0 if key not in self.at_end else 3 if (*key[:2], GATHER) in self.in_graph else 1


class Agreement:
    """Compares the backwards of one root with those of the other ranks on the mesh of its first group.

    Groups over other ranks are not compared: some of those ranks may rightly run a unit that others leave out.

    number: among the roots over the same ranks, by their first backwards that were equal on all ranks; -1 before
    """

    def __init__(self, units: Sequence[Unit], logs: Callable[[], Sequence[ForwardLog]]) -> None:
        """logs: returns the logs of forwards whose backward may come, in order; none if the root keeps no logs"""
        self.number = -1
        self._all_units = units
        self._logs = logs
        self._has_numbered_groups = False
        self._compared_in = -1  # the backward (id of its graph task) in which it was compared with an earlier root
        self._process_groups: list[dist.ProcessGroup] = []  # none: there is nobody to compare with before a backward
        mesh = next((unit.groups[0].mesh for unit in units if unit.groups), None)
        if mesh is None:
            return
        names = [backends.backend_of(group, mesh.device_type) for group in groups_of(mesh)]
        if not names or any(backends.is_stream_ordered(name) or not backends.moves_data(name) for name in names):
            return
        self._process_groups = groups_of(mesh)
        uses = {unit: [group for group in unit.uses if group.mesh.ranks == mesh.ranks] for unit in units}
        self._uses = {unit: groups for unit, groups in uses.items() if groups}
        self._units = list(self._uses)
        self._users: dict[ParamGroup, list[Unit]] = {}
        for unit, used in self._uses.items():
            for group in used:
                self._users.setdefault(group, []).append(unit)
        self._below: dict[Unit, list[ShardedParam]] = {}
        self._peers = peers_on(mesh)
        self._peers.roots.add(self)

    def retire(self) -> None:
        """Stop comparing: another root has taken over the units."""
        if self._process_groups:
            self._peers.roots.discard(self)

    def number_groups(self) -> None:
        """Number the groups in the first backward that reduces, in which all ranks take part."""
        if self._has_numbered_groups:
            return
        owned = [(unit, group) for unit in self._all_units for group in unit.groups]
        if any(_reduces(unit, group) for unit, group in owned):
            self._has_numbered_groups = True
            for _, group in owned:
                peers_on(group.mesh).number(group)

    def check(self) -> None:
        """Raise OrderError on all ranks if one of them communicates in another order in this backward, just begun.

        Collective: yes, over the shard axis, then the replicate axis; no if the root communicates nothing, or was
                    compared with an earlier root
        Raises:     also problems from ``tell_later``: on all ranks, or, if ranks compare nothing, on this rank
        """
        self.number_groups()  # for the tags, by which ranks compare afterwards
        if not self._process_groups:
            if has_untold():
                agree_over([], None)
            return
        task = torch_autograd.current_graph_task()
        if self._compared_in == task or not any(map(self._communicates, self._units)):
            return
        ways = [self._way(is_first=True)]
        ways += [way for other in self._peers.roots if other is not self and (way := other._way()).calls]
        new = [way.root for way in sorted(ways, key=lambda way: way.began) if way.root.number < 0]
        for number, root in enumerate(new, start=self._peers.num_roots):
            root.number = number
        try:
            self._agree(self._order(ways))
        except BaseException:
            for root in new:
                root.number = -1
            raise
        self._peers.num_roots += len(new)
        for way in ways[1:]:
            way.root._compared_in = task

    # --- what this rank will do ---

    def _way(self, is_first: bool = False) -> _Way:
        """How the backward that has just begun goes through this root. is_first: it reaches no other root earlier"""
        all_logs = self._logs()
        logs = [log for log in all_logs if log.is_in_this_backward()] or (all_logs[-1:] if is_first else [])
        reached: dict[int, list[Call]] = {}
        for index, unit in enumerate(self._units):
            if not self._communicates(unit):
                continue
            if all_logs:  # all ranks do what is in the logs
                calls = [call for log in logs for call in log.calls.get(unit, ()) if call.is_watched]
            else:
                calls = self._calls_in_graph(unit)
            if calls:
                reached[index] = calls
        began = min((call.entered for calls in reached.values() for call in calls), default=-1.0)
        left = max((call.left for calls in reached.values() for call in calls), default=-1.0)
        return _Way(self, reached, list(logs) if all_logs else None, began, left)

    def _order(self, ways: list[_Way]) -> _Order:
        """What the backward does on these ways. The first one goes through this root."""
        ways.sort(key=lambda way: (way.root is not self, -way.left))
        timed = sorted((each for way in ways for each in way.root._in_graph(way)), reverse=True)
        recomputed = [
            log.reached() for way in ways for log in way.logs or () if log.gathers_in_other_order(way.root._gathers)
        ]
        order = _Order({}, [way.root.number for way in ways], [key for _, key in timed], [], recomputed)
        in_graph = set(order.in_graph)
        for root, calls, *_ in ways:
            reached = {group for index in calls for group in root._uses[root._units[index]]}
            for index, unit in enumerate(root._units):
                for place, group in root._reduced(unit).items():
                    key = (root.number, index, place)
                    order.frozen[key] = tuple(
                        at for at, param in enumerate(group.params) if not param.sharded.requires_grad
                    )
                    if key not in in_graph and (group in reached or group.gradients.is_due):
                        order.at_end.append(key)
        return order

    def _in_graph(self, way: _Way) -> Iterator[tuple[float, _Key]]:
        """What the backward does while the graph runs, with moments of forward: a backward reaches the latest first."""
        for index, calls in way.calls.items():
            unit = self._units[index]
            if self._gathers(unit):
                for call in calls if way.logs is None else _gathered(calls):
                    yield call.left, (self.number, index, GATHER)
            if all(call.has_inputs or call.graph() for call in calls) and not unit.calls.to_rerun:
                at = min(call.entered for call in calls)
                for place, group in self._reduced(unit).items():
                    # A group that other units borrow is reduced at the end, whichever of its units backward reached.
                    if group.holders is None:
                        yield at, (self.number, index, place)

    def _reduced(self, unit: Unit) -> dict[int, ParamGroup]:
        """The unit's own groups that a backward may reduce, by their places among all of its own."""
        own = enumerate(unit.groups)
        return {place: group for place, group in own if group in self._uses[unit] and _reduces(unit, group)}

    def _communicates(self, unit: Unit) -> bool:
        return self._gathers(unit) or any(_reduces(unit, group) for group in self._uses[unit])

    def _gathers(self, unit: Unit) -> bool:
        """Whether a backward that comes to the unit gathers it. Equal on all ranks, unlike which graphs are alive."""
        return any(
            group.mesh.shard_size > 1
            and (group.state is GroupState.SHARDED or not any(map(self._keeps, self._users.get(group, [unit]))))
            for group in self._uses.get(unit, unit.uses)
        )

    def _keeps(self, unit: Unit) -> bool:
        """Whether forward leaves the unit unsharded."""
        after = unit.options.reshard_after_forward
        return after is False or (unit.options.reshard_is_default and unit is self._all_units[0])

    def _calls_in_graph(self, unit: Unit) -> list[Call]:
        """The calls of ``unit`` in this backward; of those without an input that needs a gradient, the first."""
        task = torch_autograd.current_graph_task()
        calls = [call for call in unit.calls.awaiting if call.will_pass_inputs(task)]
        # Only some of them may be in this backward, and the user may keep the graph of an evaluation.
        unknown = [call for call in calls if not call.graph()]
        if unknown and len(unknown) == len(calls) and not self._gives_gradients(unit):
            return []
        return [call for call in calls if call not in unknown[1:]]

    def _gives_gradients(self, unit: Unit) -> bool:
        """Whether parameters in its modules' trees get gradients: then a loss uses a call whose inputs need none."""
        if unit not in self._below:
            modules = {each for module in unit.modules for each in module.modules()}
            units = [other for other in self._all_units if not modules.isdisjoint(other.modules)]
            self._below[unit] = [param for other in units for group in other.uses for param in group.params]
        return any(
            param.unsharded is not None
            and param.unsharded.requires_grad
            and torch_autograd.leaf_gets_gradient_in_this_backward(param.unsharded)
            for param in self._below[unit]
        )

    # --- what all ranks will do ---

    def _agree(self, mine: _Order) -> None:
        """Return if all ranks have one order, or can have it if some reduce more at the end. Collective: yes."""
        axes = [(group, torch.device("cpu")) for group in self._process_groups]
        if all_say(mine.with_ends(), axes, "comparison of ranks before backward"):
            return
        orders = told_over(self._process_groups, mine)
        ends = {key for order in orders.values() for key in order.at_end}
        left_out = {key for order in orders.values() for key in ends.difference(order.in_graph, order.at_end)}
        first, *others = (order.with_ends(ends) for order in orders.values())
        # The backward of some ranks may have no end through another root. And where a custom communicator reduces, no
        # flags tell the parameters that a rank did not use.
        can_join = all(order.roots[0] == root for root, *_ in left_out for order in orders.values()) and all(
            group.gradients.options.comm is None for _, index, _ in left_out for group in self._units[index].groups
        )
        if not can_join or any(other != first for other in others):
            self._refuse(orders)
        for _, index, place in ends.difference(mine.in_graph, mine.at_end):
            self._units[index].groups[place].gradients.reached = True

    def _refuse(self, orders: Mapping[int, _Order]) -> NoReturn:
        roots = {each.number: each for each in self._peers.roots}
        keys = sorted({key for order in orders.values() for key in (*order.in_graph, *order.at_end)})
        has_others = len({root for root, *_ in keys}) > 1
        items: dict[tuple[int, int], str] = {}  # what is said of a unit's groups replaces what is said of its gathers
        for key in keys:
            ranks: dict[int, list[int]] = {}
            for rank, order in sorted(orders.items()):
                ranks.setdefault(order.way_of(key), []).append(rank)
            if len(ranks) > 1:
                root, index, _ = key
                name = roots[root]._name_of(index, has_others) if root in roots else "a root that this rank has not run"
                said = [f"the backward of ranks {each} {_SAID[way]}" for way, each in sorted(ranks.items())]
                items[root, index] = f"{name}: {'; '.join(said)}"
        if not items and (toggled := self._toggled(roots, orders)):
            raise OrderError(
                f"{len(toggled)} parameters have requires_grad on some ranks alone",
                items=toggled,
                expected="on all ranks the same parameters to be trained",
                fix="call requires_grad_() on all ranks, before the forward; go on after reset_iter_state()",
            )
        if not items and any(order.recomputed for order in orders.values()):
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
            items=list(items.values()),
            expected=EXPECTED,
            fix=f"{FIX}; go on after reset_iter_state()",
        )

    def _toggled(self, roots: Mapping[int, Agreement], orders: Mapping[int, _Order]) -> list[str]:
        found = []
        for key in sorted(set.intersection(*(set(order.frozen) for order in orders.values()))):
            root, index, place = key
            params = roots[root]._units[index].groups[place].params if root in roots else []
            for at, param in enumerate(params):
                frozen = [rank for rank, order in sorted(orders.items()) if at in order.frozen[key]]
                if 0 < len(frozen) < len(orders):
                    found.append(f"{param.fqn}: frozen on ranks {frozen}, trained on the others")
        return found

    def _name_of(self, index: int, has_others: bool) -> str:
        unit = self._units[index]
        root = f"the root {type(self._all_units[0].modules[0]).__name__}" if has_others else "the root"
        return f"{unit.fqn} of {root}" if unit.fqn and has_others else unit.fqn or root


def _gathered(calls: Iterable[Call]) -> Iterator[Call]:
    """Yields the calls of a unit for which a backward gathers it: no other call's backward is under way.

    A call without an input that needs a gradient may have one on other ranks: its backward counts as never over.
    """
    begun: set[Call] = set()
    moments = [(call.left, call) for call in calls] + [(call.entered, call) for call in calls if call.has_inputs]
    for _, call in sorted(moments, key=lambda moment: -moment[0]):
        if call in begun:
            begun.remove(call)
        else:
            if not begun:
                yield call
            begun.add(call)


def _reduces(unit: Unit, group: ParamGroup) -> bool:
    return unit.micro_batch.reduces and any(param.sharded.requires_grad for param in group.params)
