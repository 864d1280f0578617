"""The order of a forward's calls, for backwards of which ranks leave out different parts.

A backward runs the nodes of its graph in the reverse of the order in which they were made. So the begin and the end of every
unit's backward come in the reverse of the order in which its forward ended and began. A rank whose loss ignores an output leaves out
some of these *moments*, and adds none. From the log of its own forward it knows when the other ranks come to them, and what they
communicate then. This file refuses to know what happens at a moment.

fsdp2 keeps logs only after ``set_reduce_scatter_unused_params(True)``: ranks then also gather and reduce units that no rank reaches.

Worked example, units a and b in a root; this rank's loss ignores what b returned

    forward     enter root, enter a, leave a, enter b, leave b, leave root
    log         [end root, end a, begin a, end b, begin b, begin root]      a backward reads it from its end
    backward    begin root; begin a, and before it on behalf of the graph: begin b, end b
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .. import torch_compat as compat
from .call import Call, GraphPart
from .unit import Unit

_numbers = itertools.count()
_segments: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""Numbers of checkpointed segments."""


class Moment(NamedTuple):
    """The begin of a call's backward, or its end."""

    unit: Unit
    call: Call
    is_end: bool


class ForwardLog:
    """The calls of one forward of a root that has a graph. A log lives as long as the graph of one of its calls, which refers to it."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.moments: list[Moment | None] = []
        self.calls: dict[Unit, list[Call]] = {}

    def enter(self, unit: Unit, part: GraphPart) -> None:
        """A forward call of ``unit`` begins. A list of modules that run in one pass enters once."""
        call = part.call
        if call.log is None:
            part.log, part.bottoms = self, []
            call.log = self.number
            call.end_at = len(self.moments)
            around = compat.checkpoint_around()
            if around is not None:
                call.segment = _segments.setdefault(around, next(_numbers))
            self.moments.append(Moment(unit, call, is_end=True))
            self.calls.setdefault(unit, []).append(call)

    def leave(self, unit: Unit, part: GraphPart) -> None:
        """A forward call of ``unit`` has ended. In a list each module's call does; the last one counts."""
        call = part.call
        call.has_inputs = bool(part)
        if call.is_watched:
            if call.begin_at is not None:
                self.moments[call.begin_at] = None
            call.begin_at = len(self.moments)
            self.moments.append(Moment(unit, call, is_end=False))

    def gathers_in_other_order(self, is_gathered: Callable[[Unit], bool]) -> bool:
        """Whether a segment's recomputation gathers units in another order than the ranks whose backward leaves the segment out.

        The recomputation gathers in the order of forward. For one unit, or one unit inside another, both orders are the same.
        """
        segments: dict[int, list[Call]] = {}
        around: list[Call] = []
        gathered = [call for unit, calls in self.calls.items() if is_gathered(unit) for call in calls if call.begin_at is not None]
        for call in sorted(gathered, key=lambda each: each.end_at):
            while around and not _holds(around[-1], call):
                around.pop()
            around.append(call)
            segment = next((each.segment for each in around if each.segment is not None), None)
            if segment is not None:
                segments.setdefault(segment, []).append(call)
        return any(len(others) > 1 or (others and not _holds(first, others[0])) for first, *others in segments.values())

    def reached(self) -> list[int]:
        """The places of the calls that this rank's backward reaches."""
        return [call.end_at for calls in self.calls.values() for call in calls if call.is_in_this_backward()]

    def is_in_this_backward(self) -> bool:
        """Whether the backward that has just begun reaches any call of this forward."""
        return any(call.is_in_this_backward() for calls in self.calls.values() for call in calls)


def _holds(outer: Call, inner: Call) -> bool:
    """Whether ``inner``, which began later, was a part of ``outer``."""
    return outer.begin_at is not None and inner.begin_at is not None and inner.begin_at < outer.begin_at


class ForwardLogs:
    """The logs of the forwards whose backward may come."""

    def __init__(self) -> None:
        self._logs: list[weakref.ref[ForwardLog]] = []

    def begin(self) -> ForwardLog:
        """A forward begins."""
        log = ForwardLog()
        self._logs = [reference for reference in self._logs if reference() is not None]
        self._logs.append(weakref.ref(log))
        return log

    def alive(self) -> list[ForwardLog]:
        return [log for reference in self._logs if (log := reference()) is not None]


class Reading:
    """One backward's way through the logs of the forwards that it reaches, the latest first."""

    def __init__(self, task: int, logs: Sequence[ForwardLog]) -> None:
        """task: the outermost graph task of the backward; logs: all that are alive, in order."""
        self._task = task
        self._logs = {log.number: log for log in logs}
        self._to_come = {log.number: len(log.moments) for log in logs if log.is_in_this_backward()}  # moments, by log
        self._done: set[tuple[Call, bool]] = set()

    def is_done(self, call: Call, is_end: bool) -> bool:
        """Whether this moment has passed, on this rank or on another."""
        return (call, is_end) in self._done

    def reach(self, call: Call, is_end: bool) -> Iterator[Moment]:
        """This rank's backward has come to a moment: yields the earlier moments that it has left out, in order."""
        assert call.log is not None
        number = call.log
        log = self._logs[number]
        self._to_come.setdefault(number, len(log.moments))
        for later in reversed(self._logs.values()):
            if later is log:
                break
            yield from self._left_out(later, -1, in_graph=True)
        index = call.end_at if is_end else call.begin_at
        assert index is not None
        yield from self._left_out(log, index, in_graph=True)
        self._to_come[number] = min(self._to_come[number], index)
        self._done.add((call, is_end))

    def before_recomputation(self, unit: Unit) -> Iterator[Moment]:
        """``unit`` runs again, maybe before its backward begins: yields the moments before it that this rank has left out."""
        for log in reversed(self._logs.values()):
            for call in reversed(log.calls.get(unit, ()) if log.number in self._to_come else ()):
                # A call without inputs, or with a detached output, may be in this backward: assume that it is what runs again.
                is_known = bool(call.graph())
                is_reached = call.is_in_this_backward() if is_known else call.begun in (-1, self._task)
                begins = call.begin_at is not None and not self.is_done(call, is_end=False) and is_reached
                if begins and call.segment is not None:
                    assert call.begin_at is not None
                    for later in reversed(self._logs.values()):
                        if later is log:
                            break
                        yield from self._left_out(later, -1, in_graph=True)
                    yield from self._left_out(log, call.begin_at, in_graph=True)
                    return

    def left_out_at_end(self) -> Iterator[Moment]:
        """Yields the moments that are left when the graph has run."""
        for log in reversed(self._logs.values()):
            yield from self._left_out(log, -1, in_graph=False)

    def _left_out(self, log: ForwardLog, stop: int, in_graph: bool) -> Iterator[Moment]:
        """The moments of ``log`` behind that at ``stop``; with ``in_graph``, only those before the next that the graph reaches."""
        while self._to_come.get(log.number, 0) > stop + 1:
            moment = log.moments[self._to_come[log.number] - 1]
            if moment is not None and not self.is_done(moment.call, moment.is_end):
                call = moment.call
                if not moment.is_end:
                    self._done.add((call, False))
                    yield moment
                elif call.has_inputs and call.begin_at is not None:
                    if in_graph and call.will_end(self._task):
                        return
                    self._done.add((call, True))
                    yield moment
            self._to_come[log.number] -= 1

    def calls_left(self, unit: Unit) -> list[Call]:
        """The calls of ``unit`` in this backward that have not ended, or of which that is unknown because no input needs a gradient."""
        calls = [call for number in self._to_come for call in self._logs[number].calls.get(unit, ())]
        return [call for call in calls if call.begin_at is not None and not self.is_done(call, is_end=True)]
