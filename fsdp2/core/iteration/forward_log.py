"""The order of a forward's calls, for backwards of which ranks leave out different parts.

A backward runs the nodes of its graph in the reverse of the order in which they were made. So the begin and the end of every unit's
backward come in the reverse of the order in which its forward ended and began. A rank whose loss ignores an output leaves out some
of these *moments*, and adds none. From the log of its own forward it knows when the other ranks come to them, and what they
communicate then.

fsdp2 keeps logs only after ``set_reduce_scatter_unused_params(True)``: ranks then also gather and reduce units that no rank reaches.

Worked example, units a and b in a root; this rank's loss ignores what b returned

    forward     enter root, enter a, leave a, enter b, leave b, leave root
    log         [end root, end a, begin a, end b, begin b, begin root]      a backward reads it from its end
    backward    begin root; begin a, and before it on behalf of the graph: begin b, end b
"""

from __future__ import annotations

import collections
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


class _WithoutGraph(NamedTuple):
    """A call that has no backward, in a checkpointed segment. place: where its moments would be"""

    unit: Unit
    place: int
    segment: int


class ForwardLog:
    """The calls of one forward of a root that has a graph. A log lives as long as the graph of one of its calls, which refers to it."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.moments: list[Moment | None] = []
        self.calls: dict[Unit, list[Call]] = {}
        self._without_graph: list[_WithoutGraph] = []

    def enter(self, unit: Unit, part: GraphPart) -> None:
        """A forward call of ``unit`` begins. In a list each module's call does; the first one counts."""
        call = part.call
        segment = _segment_around()
        call.may_rerun |= segment is not None
        if call.log is None:
            part.log, part.bottoms = self, []
            call.log = self.number
            call.end_at = len(self.moments)
            call.segment = segment
            self.moments.append(Moment(unit, call, is_end=True))
            self.calls.setdefault(unit, []).append(call)

    def enter_without_graph(self, unit: Unit) -> None:
        """A forward call of ``unit`` begins under no_grad."""
        segment = _segment_around()
        if segment is not None:
            self._without_graph.append(_WithoutGraph(unit, len(self.moments), segment))

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
        segments: dict[int, list[tuple[Call, Unit]]] = {}
        around: list[Call] = []
        gathered = [
            (call, unit) for unit, calls in self.calls.items() if is_gathered(unit) for call in calls if call.begin_at is not None
        ]
        for call, unit in sorted(gathered, key=lambda each: each[0].end_at):
            while around and not _holds(around[-1], call):
                around.pop()
            around.append(call)
            segment = next((each.segment for each in around if each.segment is not None), None)
            if segment is not None:
                segments.setdefault(segment, []).append((call, unit))
        return self._gathers_more(segments, is_gathered) or any(
            len(others) > 1 or (others and not _holds(first[0], others[0][0])) for first, *others in segments.values()
        )

    def _gathers_more(self, segments: dict[int, list[tuple[Call, Unit]]], is_gathered: Callable[[Unit], bool]) -> bool:
        """Whether recomputations of these segments gather units that ran without a graph, to whose backward no rank comes.

        All ranks gather such a unit, by prefetching, after the one unit with a graph that it is a part of.
        """
        seen: set[int] = set()
        logged = (
            _WithoutGraph(unit, call.end_at, call.segment)
            for unit, calls in self.calls.items()
            for call in calls
            if call.begin_at is None and call.segment is not None
        )
        for other in (*self._without_graph, *logged):
            members = segments.get(other.segment, [])
            if not members or not is_gathered(other.unit) or any(unit is other.unit for _, unit in members):
                continue
            (call, unit), *more = members
            assert call.begin_at is not None
            is_prefetched = call.end_at < other.place <= call.begin_at and unit.options.prefetches_the_one_before
            if more or other.segment in seen or not is_prefetched:
                return True
            seen.add(other.segment)
        return False

    def reached(self) -> list[int]:
        """The places of the calls that this rank's backward reaches."""
        return [call.end_at for calls in self.calls.values() for call in calls if call.is_in_this_backward()]

    def is_in_this_backward(self) -> bool:
        """Whether the backward that has just begun reaches any call of this forward."""
        return any(call.is_in_this_backward() for calls in self.calls.values() for call in calls)


def _segment_around() -> int | None:
    """The number of the outermost checkpointed segment whose forward is running."""
    around = compat.checkpoint_around()
    return None if around is None else _segments.setdefault(around, next(_numbers))


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
        self._num_recomputed: collections.Counter[Call] = collections.Counter()  # modules

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
                if not call.may_rerun or call.begin_at is None or not self._may_run_again(unit, call):
                    continue
                self._num_recomputed[call] += 1
                if not self.is_done(call, is_end=False):
                    for later in reversed(self._logs.values()):
                        if later is log:
                            break
                        yield from self._left_out(later, -1, in_graph=True)
                    yield from self._left_out(log, call.begin_at, in_graph=True)
                return

    def _may_run_again(self, unit: Unit, call: Call) -> bool:
        """Whether a recomputation of ``unit`` may be that of ``call``; the latest such call is what runs again.

        A call without inputs, or with a detached output, may be in this backward: assume that it is.
        """
        if call.graph():
            is_reached = call.is_in_this_backward()
        else:
            is_reached = call.begun == self._task or (call.begun == -1 and not self.is_done(call, is_end=False))
        if not is_reached or self.is_done(call, is_end=True):
            return False
        # Of a call without inputs nothing tells when its backward has ended; each of its modules runs again once.
        return call.has_inputs or self._num_recomputed[call] < len(unit.modules)

    def left_out_at_end(self) -> Iterator[Moment]:
        """Yields the moments that are left when the graph has run."""
        for log in reversed(self._logs.values()):
            yield from self._left_out(log, -1, in_graph=False)

    def _left_out(self, log: ForwardLog, stop: int, in_graph: bool) -> Iterator[Moment]:
        """The moments of ``log`` after that at ``stop``; with ``in_graph``, only those before the next that the graph reaches."""
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
