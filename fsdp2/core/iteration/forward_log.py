"""What a forward did, in order, for a backward that not all ranks take the same way.

A backward runs the nodes of its graph in the reverse of the order in which they were made. So the begin and the end of every
unit's backward come in the reverse of the order in which its forward ended and began; a rank whose loss ignores an output leaves out
some of these *moments*, and has no others. With the log of its own forward it knows when the other ranks have theirs, and what they
communicate then. It refuses to know what is done at a moment.

Kept only where ``set_reduce_scatter_unused_params`` asks for it: what no rank reaches is then gathered and reduced all the same.

Worked example, units a and b in a root; this rank's loss ignores what b returned

    forward     enter root, enter a, leave a, enter b, leave b, leave root
    log         [end root, end a, begin a, end b, begin b, begin root]      to be read from behind
    backward    begin root; begin a, and before it on behalf of the graph: begin b, end b
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from .unit import Call, Unit, Visit

_numbers = itertools.count()


class ForwardLog:
    """The calls of one forward of a root, with autograd; alive as long as the graph of one of them, whose Call has it."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.moments: list[tuple[Visit, bool] | None] = []  # with True: the end of its backward
        self.visits: dict[Unit, list[Visit]] = {}
        self.task = -1  # the backward that reads it
        self.position = 0  # how many of its moments are still to come there

    def enter(self, call: Call) -> None:
        """The forward of ``call`` begins; once for a list of modules that run in one pass."""
        if call.visit is None:
            call.log = self
            call.visit = Visit(self.number, call, len(self.moments))
            self.moments.append((call.visit, True))
            self.visits.setdefault(call.unit, []).append(call.visit)

    def leave(self, call: Call) -> None:
        """The forward of ``call`` has ended; of a list of modules, that of each: the last one counts."""
        visit = call.visit
        assert visit is not None
        visit.has_inputs = bool(call.nodes)
        if call.is_watched:
            if visit.begin_at is not None:
                self.moments[visit.begin_at] = None
            visit.begin_at = len(self.moments)
            self.moments.append((visit, False))

    def is_in_this_backward(self) -> bool:
        """Whether the backward that has just begun reaches anything of this forward."""
        return any(visit.is_in_this_backward() for visits in self.visits.values() for visit in visits)


class Reading:
    """One backward's way through the logs of the forwards that it reaches, the latest first."""

    def __init__(self, task: int, logs: Iterable[ForwardLog]) -> None:
        """logs: all that are alive, in order."""
        self._task = task
        self._logs = list(logs)
        self._numbered = {log.number: log for log in self._logs}  # a backward keeps all logs
        for log in self._logs:
            if log.is_in_this_backward():
                self._open(log)

    def _open(self, log: ForwardLog) -> None:
        log.task = self._task
        log.position = len(log.moments)

    def left_out_before(self, visit: Visit, is_end: bool) -> Iterator[tuple[Visit, bool]]:
        """The moments before this one that this rank's backward left out (True: an end), in order; that of ``visit`` is passed then."""
        log = self._numbered[visit.log]
        if log.task != self._task:
            self._open(log)
        for later in reversed(self._logs):
            if later is log:
                break
            yield from self._left_out(later, -1, in_graph=True)
        index = visit.end_at if is_end else visit.begin_at
        assert index is not None
        yield from self._left_out(log, index, in_graph=True)
        log.position = min(log.position, index)

    def left_out_at_end(self) -> Iterator[tuple[Visit, bool]]:
        """The rest, when the graph has run."""
        for log in reversed(self._logs):
            yield from self._left_out(log, -1, in_graph=False)

    def _left_out(self, log: ForwardLog, stop: int, in_graph: bool) -> Iterator[tuple[Visit, bool]]:
        """The moments of ``log`` behind that at ``stop``; only those before one that is still to come in the graph."""
        while log.task == self._task and log.position > stop + 1:
            moment = log.moments[log.position - 1]
            if moment is not None:
                visit, is_end = moment
                if is_end and visit.has_end() and visit.ended != self._task:
                    if in_graph and visit.will_end_itself():
                        return
                    visit.ended = self._task
                    yield moment
                elif not is_end and visit.begun != self._task:
                    visit.begun = self._task
                    yield moment
            log.position -= 1

    def still_to_end(self, unit: Unit) -> list[Visit]:
        """The visits of ``unit`` in this backward whose end is still to come, or unknown, since no input needs a gradient."""
        task = self._task
        visits = [visit for log in self._logs if log.task == task for visit in log.visits.get(unit, ())]
        return [visit for visit in visits if visit.begin_at is not None and visit.ended != task]
