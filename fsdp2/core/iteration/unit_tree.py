"""All units under one root, and what they hand on from forward to backward and from step to step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import OrderError, unseen_writes_error
from ..comm.streams import Event, Streams, streams_of
from ..group.param import ShardedParam
from ..group.param_group import GroupState, ParamGroup
from .reductions import Reductions
from .unit import Kept, Unit


class ForwardEnd(NamedTuple):
    """Where compute was when a forward ended. Backward may gather its first unit after that point, alongside the loss.

    unit:     the last that ran and was resharded
    event:    on compute
    versions: of the shards of its groups
    """

    unit: Unit
    event: Event
    versions: list[tuple[int, int]]


class Iteration:
    """What forwards leave to the backward and the forward that follow. A new one replaces one that is used up.

    order:     units in the order of the ends of forward calls since the last backward, for backward prefetch
    positions: the places of each unit in ``order``, the last one last
    unsharded: groups that stay unsharded (or on the smaller mesh) until the next forward
    left_by_forward: units that the last forward left unsharded
    forward_end: of the last forward, until backward gathers its first unit
    """

    def __init__(self) -> None:
        self.order: list[Unit] = []
        self.positions: defaultdict[Unit, list[int]] = defaultdict(list)
        self.unsharded: dict[ParamGroup, Kept] = {}
        self.left_by_forward: set[Unit] = set()
        self.forward_end: ForwardEnd | None = None

    def cut(self, num_calls: int) -> None:
        """Forget the calls after the first ``num_calls``."""
        for unit in set(self.order[num_calls:]):
            self.positions[unit] = [position for position in self.positions[unit] if position < num_calls]
        del self.order[num_calls:]

    def after_backward(self, is_last: bool) -> Iteration:
        """What follows a backward; the last backward uses up the order."""
        new = Iteration()
        if not is_last:
            new.order, new.positions = self.order, self.positions
        return new


class UnitTree:
    """All units under one root.

    units:         in the order of named_modules(); the root first
    lists:         the units of several modules
    holds_pending: the user ends iterations with ``finalize``, and what a backward has left pending waits for that
    records:       for each unit whose forward began an iteration, the order of units in the last one
    iteration:     the one under way
    followers:     functions that get each ``Backward`` that begins
    """

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        self.root = root
        self.units = units
        self.lists = [unit for unit in units if len(unit.modules) > 1]
        self.streams: Streams = streams_of(root.device)
        self.holds_pending = False
        self.reductions = Reductions(self.streams)
        self.records: dict[Unit, list[Unit]] = {}
        self.iteration = Iteration()
        self.followers: list[Callable[[Any], None]] = []
        self._offloaded = [group for unit in units for group in unit.groups if group.options.offload]

    def leave_unsharded(self, unit: Unit, for_user: bool = False) -> None:
        """Leave ``unit`` unsharded until the next forward, or until its shards are written. for_user: the user asked"""
        if for_user:
            unit.kept_frozen = dict.fromkeys(unit.kept_frozen)
        in_graph = for_user and self.streams.is_capturing()
        for group in unit.uses:
            self.iteration.unsharded[group] = unit.kept_frozen.get(group) or Kept(
                group.shards_version(), group.unsharded_version(), for_user, in_graph
            )

    def refuse_gathers_of_before(self) -> None:
        """A graph is being captured, which cannot wait for a gather that the user began before.

        Raises: OrderError naming the modules
        """
        names = [
            group.fqn or "the root"
            for group, kept in self.iteration.unsharded.items()
            if group.state is GroupState.UNSHARDING and not kept.in_graph
        ]
        if names:
            raise OrderError(
                f"unshard(async_op=True) of {', '.join(dict.fromkeys(names))} was under way "
                "when the capture of a graph began",
                expected="no collective under way at that moment: a graph cannot wait for work from outside",
                fix="call wait() of its handle before the capture, or unshard within it",
            )

    def reshard_what_is_out_of_date(self, groups: Iterable[ParamGroup] | None = None) -> None:
        """Reshard each of ``groups`` (None: all) that stayed unsharded and whose shards have been written since.

        Raises: OrderError naming the parameters that were written where no version counter of a shard shows it;
                ParameterError naming one that the user has replaced by what is not sharded alike
        """
        unsharded = self.iteration.unsharded
        for unit in self.units:
            for group, frozen in unit.kept_frozen.items():
                if group.state is GroupState.HIDDEN and frozen is not None:
                    unsharded[group] = frozen
        lost: dict[ParamGroup, list[str]] = {}
        for group in list(unsharded) if groups is None else groups:  # a forward that begins may run only some of them
            kept = unsharded.get(group)
            if kept is None:
                continue
            group.take_over_toggles()
            if group.state is GroupState.SHARDED:
                del unsharded[group]
                continue
            wrote_whole = group.unsharded_version() != kept.unsharded
            if group.adopt_replaced():
                group.reshard_for_all()
                del unsharded[group]
            elif wrote_whole and not kept.for_user:
                lost[group] = [param.fqn for param in group.params]
            elif group.is_out_of_date(kept.shards):  # equal on all ranks; HIDDEN depends on which rank lists parameters
                group.reshard_for_all()
                del unsharded[group]
            elif not wrote_whole and self.streams.host_waits and (unseen := group.written_unseen()):
                lost[group] = [param.fqn for param in unseen]
        if lost:
            for group in lost:
                group.reshard_for_all()
                del unsharded[group]
            raise unseen_writes_error([name for names in lost.values() for name in names])

    def note_changes_since_forward(self) -> None:
        """A backward begins: look at what the user did to groups that it need not gather.

        Raises: as ``refuse_lost_writes``
        """
        for group in self.iteration.unsharded:
            group.take_over_toggles()
            group.look_for_writes()
        self.refuse_lost_writes(self.iteration.unsharded)

    def refuse_lost_writes(self, groups: Iterable[ParamGroup]) -> None:
        """The shards of ``groups`` are about to be used again: they lack what was written to unsharded parameters.

        Raises: OrderError naming these parameters
        """
        names = []
        for group in groups:
            kept = self.iteration.unsharded.get(group)
            if kept is None or kept.for_user or group.state is GroupState.SHARDED:
                continue
            if group.unsharded_version() != kept.unsharded:
                names += [param.fqn for param in group.params]
        if names:
            raise unseen_writes_error(names)

    def written_unseen(self) -> list[ShardedParam]:
        """Parameters that were written where no version counter shows it: the next forward would use old values.

        The host waits for a device, so only tools ask; on the host each forward raises. Collective: no.
        """
        return [
            param
            for group, kept in self.iteration.unsharded.items()
            if not group.is_out_of_date(kept.shards) and group.unsharded_version() == kept.unsharded
            for param in group.written_unseen()
        ]

    def reshard_after_forward(self, unit: Unit, stays: bool = False) -> None:
        """Free what backward does not need of a unit that has run (``stays``: nothing)."""
        options = unit.options
        after = options.reshard_after_forward
        if after is True:
            # Backward needs a root as soon as it begins. If no backward can follow, nothing may stay unsharded, because
            # clipping would miss those parameters.
            stays = stays or (options.reshard_is_default and unit is self.root and torch.is_grad_enabled())
        else:
            # If no backward follows to reshard it, a user who looks for gradients must find sharded parameters now.
            stays = torch.is_grad_enabled() or not unit.has_gradients()
        if not stays:
            unit.reshard()
            return
        self.leave_unsharded(unit)  # before the shards over a smaller mesh are made, for which there may be no memory
        self.iteration.left_by_forward.add(unit)
        if after is not True and after is not False:
            unit.reshard(to_smaller=True)

    def note_forward_end(self) -> None:
        """A forward whose backward may come has ended."""
        self.reductions.note_compute()
        for unit in reversed(self.iteration.order):
            if any(group.state is GroupState.SHARDED for group in unit.uses):
                if not self.streams.is_capturing():  # the graph of a backward cannot wait for an event of another graph
                    versions = [group.shards_version() for group in unit.uses]
                    self.iteration.forward_end = ForwardEnd(unit, self.streams.mark(self.streams.compute), versions)
                return

    def issue_for_backward(self, unit: Unit) -> None:
        """As ``unit.issue()``; the first unit that a backward gathers, after its forward's end, alongside the loss.

        See Note: alongside the loss. Collective: yes, over the shard axis.
        """
        end, streams = self.iteration.forward_end, self.streams
        if end is None or all(group.state is not GroupState.SHARDED for group in unit.uses):  # it stayed, or is empty
            unit.issue()
            return
        self.iteration.forward_end = None
        if end.unit is not unit or streams.is_capturing() or not unit.can_be_gathered_anew(end.versions):
            unit.issue()
            return
        streams.order(streams.copy_in, end.event)
        with streams.on(streams.copy_in):
            unit.issue()

    def has_unreduced(self) -> bool:
        """Whether gradients wait anywhere on their way to the sharded parameters."""
        if self.reductions:
            return True
        for unit in self.units:
            for group in unit.groups:  # a loop: a generator would cost every unit a call more in each backward
                if group.gradients.has_unreduced or (self.holds_pending and group.gradients.is_waiting()):
                    return True
        return False

    def await_host_reads(self) -> None:
        """Block until the host may write offloaded shards."""
        for group in self._offloaded:
            group.await_host_read()


def release(units: list[Unit]) -> None:
    """Wait for the gathers of ``units`` under way: after this, sharded parameters may be written."""
    for unit in units:
        for group in unit.uses:
            if group.state is GroupState.UNSHARDING or group.holders is not None or group in unit.kept_frozen:
                unit.release()
                break
    units.clear()
