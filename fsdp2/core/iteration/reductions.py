"""The reductions of all units under a root, under way one behind the other. It refuses to know which gradients come next.

A reduce-scatter input is memory: the reductions of at most ``limit`` units hold theirs at a time.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.streams import Stream, Streams
from ..group.gradients import Gradients
from ..group.reduction import Reduction, launch
from .late_comparison import read_later

_behind: weakref.WeakSet[Reductions] = weakref.WeakSet()
"""Those that compute is not ordered behind yet: the next backward that is the last of any root's iteration does it."""


class Reductions:
    """Reductions under way, in the order in which they were started; those of one unit together.

    limit: how many units may hold their inputs
    """

    def __init__(self, streams: Streams) -> None:
        self.limit = 1
        self._streams = streams
        self._started: list[Reduction] = []  # since all of them were finished
        self._holding: deque[list[Reduction]] = deque()

    def __bool__(self) -> bool:
        return bool(self._started)

    @property
    def num_holding(self) -> int:
        """How many units may hold their inputs now."""
        return len(self._holding)

    def poll(self) -> None:
        """Free inputs that have been read. Local: nothing that other ranks see depends on it."""
        for started in self._holding:
            for reduction in started:
                reduction.poll()

    def start(self, taken: list[tuple[Gradients, list[Tensor | None]]]) -> None:
        """Reduce what ``Gradients.take`` returned for the groups of a unit, or add it to what accumulates.

        Collective: yes, if the micro-batch reduces.
        """
        holding = self._holding
        while len(holding) >= self.limit:
            for reduction in holding.popleft():
                reduction.advance()
        started = []
        for gradients, grads in taken:
            buffer = gradients.collect(grads)
            if buffer is not None:
                reduction = gradients.reduce(buffer)
                del buffer
                started.append(reduction)
                self._started.append(reduction)  # now, for another group's gradients may be refused
        if not started:
            return
        holding.append(started)
        if not self._streams.host_waits:
            launch(started, self._streams)
            return
        for reduction in started:
            reduction.poll()

    def finish(self) -> None:
        """After this, all sharded gradients are there, as compute sees them."""
        self._order(self._streams.compute)
        for reduction in self._started:
            reduction.finish()
        _hand_out_late(self._started)
        read_later(self._started)
        self._started.clear()
        self._holding.clear()

    def finish_later(self) -> None:
        """Gradients are there in the order of the reduce stream; the next ``finish_all`` orders compute behind them.

        Not where hooks have run, of an optimizer perhaps: what they wrote is gathered behind compute.
        """
        if any(reduction.has_run_hooks for reduction in self._started):
            self.finish()
            return
        self._order(self._streams.reduce)  # to which held memory goes back: else it would add up over micro-batches
        if any(reduction.is_in_place for reduction in self._started):  # there it goes back to compute
            self._order(self._streams.compute)
        for reduction in self._started:
            reduction.let_go()
        _behind.add(self)

    def _order(self, stream: Stream) -> None:
        """On a stream device, behind everything: behind the last event of each stream."""
        streams = self._streams
        if not streams.host_waits:
            for other, event in dict([reduction.reduced for reduction in self._started]).items():
                if other != stream:
                    streams.order(stream, event)

    def abandon(self) -> None:
        """Wait for what is under way and forget it."""
        for reduction in self._started:
            reduction.abandon()
        self._started.clear()
        self._holding.clear()
        _behind.discard(self)


def _hand_out_late(reductions: Sequence[Reduction]) -> None:
    """Parameters without a gradient on this rank: did another rank have one? The host reads that from the device, once for all."""
    by_device: dict[torch.device, list[tuple[Reduction, Tensor]]] = {}  # gradients may be offloaded
    for reduction in reductions:
        flags = reduction.late_flags
        if flags is not None:
            by_device.setdefault(flags.device, []).append((reduction, flags))
    for late in by_device.values():
        read = iter(read_flags([flags for _, flags in late]))
        for reduction, flags in late:
            reduction.hand_out_late(list(itertools.islice(read, len(flags))))


def read_flags(flags: Sequence[Tensor]) -> list[float]:
    """Their values, on the host. The planner, whose tensors have none, has a function of its own in this place."""
    read: list[float] = torch.cat(list(flags)).tolist()
    return read


def finish_all() -> None:
    """Finish the reductions of all roots that were left for later."""
    for reductions in _behind:
        reductions.finish()
    _behind.clear()
