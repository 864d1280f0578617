"""The reductions of all units under a root that are under way.

A reduce-scatter input takes memory, so at most ``limit`` units may hold theirs at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.streams import Stream, Streams
from ..group.gradients import Gradients
from ..group.handing_out import HandedOut
from ..group.reduction import Reduction, legs_of
from .late_comparison import read_later

_behind: weakref.WeakSet[Reductions] = weakref.WeakSet()
"""Compute is not ordered after these reductions yet: the next backward that ends any root's iteration orders it."""


class Reductions:
    """Reductions under way, in the order of their starts. Reductions of one unit stand together.

    limit: how many units may hold their inputs
    """

    def __init__(self, streams: Streams) -> None:
        self.limit = 1
        self._streams = streams
        self._started: list[Reduction] = []  # since the last ``finish``
        self._computed_on: set[Stream] = set()  # the streams that were compute in forward and backward since then
        self._holding: deque[list[Reduction]] = deque()
        self._advanced: list[Reduction] = []  # reductions of the unit that gave up its inputs last
        self._in_graph = False  # they were left to a later ``finish`` while a graph was captured

    def __bool__(self) -> bool:
        return bool(self._started)

    def note_compute(self) -> None:
        """Gradients will be computed on what is compute now: autograd runs each node on the stream of its forward."""
        self._computed_on.add(self._streams.compute)

    def poll(self) -> None:
        """On the host, free inputs that collectives have read. Local: nothing that other ranks see depends on it."""
        if self._streams.host_waits:
            for started in self._holding:
                for reduction in started:
                    reduction.poll()

    def start(self, taken: list[tuple[Gradients, list[Tensor | None]]]) -> None:
        """Reduce what ``Gradients.take`` returned for the groups of a unit, or add it to what accumulates.

        Collective: yes, if the micro-batch reduces.
        """
        holding = self._holding
        while len(holding) >= self.limit:
            for reduction in self._advanced:
                if reduction.job.plan.group.options.offload:
                    reduction.let_go_of_copies()
            self._advanced = holding.popleft()
            for reduction in self._advanced:
                reduction.advance()
        started = []
        for gradients, grads in taken:
            buffer = gradients.collect(grads)
            if buffer is not None:
                reduction = gradients.reduce(buffer)
                del buffer
                started.append(reduction)
                self._started.append(reduction)  # before the next group, whose gradients may be refused
        if not started:
            return
        holding.append(started)
        compute = self._streams.compute
        legs = legs_of(started, self._streams, compute)
        for reduction in started:
            reduction.legs = legs
        self._streams.run(legs)
        self._computed_on.add(compute)
        self.poll()

    def finish(self) -> None:
        """Wait until all sharded gradients have arrived, as compute sees them."""
        self._order(self._streams.compute)
        for reduction in self._started:
            reduction.finish()
        handed_out = [reduction.handed_out for reduction in self._started if reduction.handed_out is not None]
        _hand_out_late(handed_out)
        read_later(handed_out)
        self._started.clear()
        self._holding.clear()
        self._advanced = []
        self._give_back()
        self._computed_on.clear()
        self._in_graph = False

    def finish_later(self) -> None:
        """Leave the gradients in the order of the reduce stream; the next ``finish_all`` orders compute after them.

        But if hooks have run, maybe an optimizer's, finish now: the next gathers send their writes, after compute only.
        """
        if any(each.handed_out is not None and each.handed_out.has_run_hooks for each in self._started):
            self.finish()
            return
        # Held memory goes back to this stream, and must not add up over micro-batches.
        self._order(self._streams.reduce)
        if any(reduction.is_in_place for reduction in self._started):  # held memory of these goes back to compute
            self._order(self._streams.compute)
        for reduction in self._started:
            reduction.let_go()
        self._give_back()
        self._in_graph = self._streams.is_capturing()
        _behind.add(self)

    def may_finish(self) -> bool:
        """Whether compute may wait for them: the graph that is being captured cannot, if they are from before."""
        return self._in_graph or not self._streams.is_capturing()

    def _order(self, stream: Stream) -> None:
        """Order ``stream`` after the last event of each stream."""
        if self._in_graph and not self._streams.is_capturing():
            return  # all streams of that graph have joined at its end
        for other, event in dict([reduction.reduced for reduction in self._started]).items():
            if other != stream:
                self._streams.order(stream, event)

    def _give_back(self) -> None:
        """Order the user's side streams, which own gradients and reduce inputs, after what compute does with them."""
        streams = self._streams
        for stream in self._computed_on:
            if stream != streams.compute:
                streams.order(stream, streams.mark(streams.compute))

    def abandon(self) -> None:
        """Wait for what is under way and forget it. Raises: LostRankError, when all of it is forgotten"""
        with contextlib.ExitStack() as in_order:
            in_order.callback(_behind.discard, self)
            in_order.callback(self._give_back)
            for reduction in reversed(self._started):
                in_order.callback(reduction.abandon)
            self._started.clear()
            self._holding.clear()
            self._advanced = []


def _hand_out_late(reduced: Sequence[HandedOut]) -> None:
    """Hand out gradients of parameters that only other ranks used; the host reads their flags, once per device."""
    by_device: dict[torch.device, list[tuple[HandedOut, Tensor]]] = {}  # gradients may be offloaded
    for each in reduced:
        flags = each.late_flags
        if flags is not None:
            by_device.setdefault(flags.device, []).append((each, flags))
    for late in by_device.values():
        read = iter(read_flags([flags for _, flags in late]))
        for each, flags in late:
            each.add_late(list(itertools.islice(read, len(flags))))


def read_flags(flags: Sequence[Tensor]) -> list[float]:
    """The values of the flags, on the host. The planner's tensors have none, so it puts a function of its own here."""
    read: list[float] = torch.cat(list(flags)).tolist()
    return read


def finish_all() -> None:
    """Finish the reductions that roots left to ``finish_later``, but those that a captured graph cannot wait for."""
    for reductions in [each for each in _behind if each.may_finish()]:
        reductions.finish()
        _behind.discard(reductions)
