"""The order of a forward's calls, for backwards in which ranks leave out different parts.

A backward runs the nodes of its graph in the reverse order of their creation. So a unit whose forward ended last
begins its backward first, and a unit whose forward began first ends its backward last. A *moment* is such a begin or
end. A rank whose loss ignores an output leaves out some of these moments, and adds none. The log of its own forward
shows when the other ranks come to them, and what they communicate then.

Logs are kept only after ``set_reduce_scatter_unused_params(True)``, ``set_optional`` or ``guarded``: ranks then gather
and reduce unreached units too.

Worked example, units a and b in a root; this rank's loss ignores what b returned

    forward     enter root, enter a, leave a, enter b, leave b, leave root
    moments     end root, end a, begin a, end b, begin b, begin root      a backward goes through them from the last one
    backward    begin root; begin a, and before it on behalf of the others: begin b, end b
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...torch_names import torch_autograd
from .call import Call, GraphPart, next_moment
from .unit import Unit


class Moment(NamedTuple):
    """The backward of ``call`` begins (at: its forward ended) or ends (at: its forward began)."""

    at: float
    unit: Unit
    call: Call
    is_end: bool


class ForwardLog:
    """The calls of one forward of a root that has a graph. The graph of each call holds it, and a guarded pass.

    is_served: an exception has ended the pass, and the next backward is on behalf of the other ranks alone
    """

    def __init__(self) -> None:
        self.is_served = False
        self.calls: dict[Unit, list[Call]] = {}
        self._segments: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def _segment_around(self) -> int | None:
        """The number of the outermost checkpointed segment whose forward is running."""
        around = torch_autograd.checkpoint_around()
        return None if around is None else self._segments.setdefault(around, next_moment())

    def enter(self, unit: Unit, part: GraphPart) -> None:
        """A forward call of ``unit`` begins. In a list each module's call does; the first one counts."""
        call = part.call
        segment = self._segment_around()
        call.may_rerun |= segment is not None
        if call.log is None:
            part.log, part.bottoms = self, []
            call.log, call.segment = weakref.ref(self), segment
            self.calls.setdefault(unit, []).append(call)

    def enter_without_graph(self, unit: Unit) -> None:
        """A forward call of ``unit`` begins under no_grad: it has no backward, but its segment may run it again."""
        if self._segment_around() is not None:
            part = GraphPart()
            Call(part)
            self.enter(unit, part)

    def in_order(self) -> list[tuple[Unit, Call]]:
        """All calls, in the order of their beginnings."""
        pairs = [(unit, call) for unit, calls in self.calls.items() for call in calls]
        return sorted(pairs, key=lambda pair: pair[1].entered)

    def moments(self) -> list[Moment]:
        """When backwards of the calls begin and end. A backward comes to the last of them first."""
        calls = [(unit, call) for unit, call in self.in_order() if call.is_watched]
        begins = [Moment(call.left, unit, call, is_end=False) for unit, call in calls]
        ends = [Moment(call.entered, unit, call, is_end=True) for unit, call in calls if call.has_inputs]
        return sorted(begins + ends, key=lambda moment: moment.at)

    def gathers_in_other_order(self, is_gathered: Callable[[Unit], bool]) -> bool:
        """Whether this rank, which recomputes a segment, gathers units in another order than a rank that does not.

        The recomputation gathers in the order of forward, and the other rank in the order of backward. Both orders are
        equal for a segment of one unit, and for a segment of a unit within a unit.
        """
        segments: dict[int | None, list[tuple[Unit, Call]]] = {}
        around: list[Call] = []
        for unit, call in self.in_order():
            if not call.is_watched or not is_gathered(unit):
                continue
            while around and not around[-1].holds(call):
                around.pop()
            around.append(call)
            segment = next((each.segment for each in around if each.segment is not None), None)
            if segment is not None:
                segments.setdefault(segment, []).append((unit, call))
        return self._gathers_more(segments, is_gathered) or any(
            len(others) > 1 or (others and not first[1].holds(others[0][1])) for first, *others in segments.values()
        )

    def _gathers_more(
        self, segments: dict[int | None, list[tuple[Unit, Call]]], is_gathered: Callable[[Unit], bool]
    ) -> bool:
        """Whether recomputing these segments gathers units that ran without a graph, which have no backward.

        One such unit is no problem: if it is a part of the only unit with a graph, all ranks prefetch it after that.
        """
        seen: set[int | None] = set()
        for other, rerun in self.in_order():
            segment = rerun.segment
            if rerun.is_watched or segment not in segments or not is_gathered(other):
                continue
            members = segments[segment]
            if any(unit is other for unit, _ in members):
                continue
            (unit, call), *more = members
            is_prefetched = call.entered < rerun.entered < call.left and unit.options.prefetches_the_one_before
            if more or segment in seen or not is_prefetched:
                return True
            seen.add(segment)
        return False

    def reached(self) -> list[int]:
        """The places, in the order of forward, of the calls that this rank's backward reaches."""
        return [place for place, (_, call) in enumerate(self.in_order()) if call.is_in_this_backward()]

    def was_in_a_backward(self) -> bool:
        """Whether a backward has begun that reaches any call of this forward; True if the forward has no backward."""
        moments = self.moments()
        return not moments or any(moment.call.begun != -1 for moment in moments)

    def is_in_this_backward(self) -> bool:
        """Whether the backward that has just begun reaches any call of this forward."""
        return self.is_served or any(call.is_in_this_backward() for calls in self.calls.values() for call in calls)


class Reading:
    """One backward's way through the logs of the forwards that it reaches, the latest first."""

    def __init__(self, task: int, logs: Sequence[ForwardLog]) -> None:
        """task: the outermost graph task of the backward; logs: all that are alive, in order."""
        self._task = task
        self._logs = logs
        self._to_come = {log: log.moments() for log in logs if log.is_in_this_backward()}  # the next one last
        self._done: set[tuple[Call, bool]] = set()
        self._num_recomputed: collections.Counter[Call] = collections.Counter()  # modules

    def is_done(self, call: Call, is_end: bool) -> bool:
        """Whether this moment has passed, on this rank or on another."""
        return (call, is_end) in self._done

    def reach(self, call: Call, is_end: bool) -> Iterator[Moment]:
        """This rank's backward has come to a moment: yields the earlier moments that it has left out, in order."""
        assert call.log is not None
        log = call.log()
        assert isinstance(log, ForwardLog)
        if log not in self._to_come:
            self._to_come[log] = log.moments()
        at = call.entered if is_end else call.left
        yield from self._left_out_before(log, at)
        to_come = self._to_come[log]
        while to_come and to_come[-1].at >= at:
            to_come.pop()
        self._done.add((call, is_end))

    def before_recomputation(self, unit: Unit) -> Iterator[Moment]:
        """``unit`` runs again, maybe before its backward begins: yields earlier moments that this rank left out."""
        for log in reversed(self._logs):
            for call in reversed(log.calls.get(unit, ()) if log in self._to_come else ()):
                if not call.may_rerun or not call.is_watched or not self._may_run_again(unit, call):
                    continue
                self._num_recomputed[call] += 1
                if not self.is_done(call, is_end=False):
                    yield from self._left_out_before(log, call.left)
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
        # Nothing tells when the backward of a call without inputs has ended; each of its modules runs again once.
        return call.has_inputs or self._num_recomputed[call] < len(unit.modules)

    def _left_out_before(self, log: ForwardLog, at: float) -> Iterator[Moment]:
        """Yields the moments that this rank's graph leaves out and other ranks reach before ``log`` is at ``at``."""
        for other in reversed(self._logs):
            yield from self._left_out(other, at if other is log else -1, in_graph=True)
            if other is log:
                return

    def left_out_at_end(self) -> Iterator[Moment]:
        """Yields the moments that are left when the graph has run."""
        for log in reversed(self._logs):
            yield from self._left_out(log, -1, in_graph=False)

    def _left_out(self, log: ForwardLog, stop: float, in_graph: bool) -> Iterator[Moment]:
        """Yields the moments of ``log`` after ``stop``. in_graph: only until the next end that the graph reaches"""
        to_come = self._to_come.get(log, [])
        while to_come and to_come[-1].at > stop:
            moment = to_come[-1]
            if not self.is_done(moment.call, moment.is_end):
                if in_graph and moment.is_end and moment.call.will_end(self._task):
                    return
                self._done.add((moment.call, moment.is_end))
                yield moment
            to_come.pop()

    def calls_left(self, unit: Unit) -> list[Call]:
        """The calls of ``unit`` in this backward that have not ended, or whose end no rank can see."""
        calls = [call for log in self._to_come for call in log.calls.get(unit, ())]
        return [call for call in calls if call.is_watched and not self.is_done(call, is_end=True)]
