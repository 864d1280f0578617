"""One forward call of a unit: when it began and ended, and what backwards have done with it.

A call is a record, and a part of autograd's graph belongs to it: the nodes that its inputs pass through. That part lives as long as the
graph, whose hooks hold it, and the record only refers to it: so lists and logs may keep the record without keeping the graph. This
file refuses to know units, and what is done at any moment.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

from torch import nn

from .. import torch_compat as compat

next_moment = itertools.count().__next__
"""Numbers for the beginnings and ends of forward calls, in the order in which they happen."""


class GraphPart(list[Any]):
    """The graph nodes that a call's inputs pass through: one for each input that needs a gradient, which runs when that is done.

    call:    whose they are
    bottoms: nodes below the call's outputs, of which one runs at least in every backward that reaches one of these; only if a log is
             kept, and only of a call that began the forward, or none of whose inputs needs a gradient. Not the outputs' own nodes:
             these hold this object.
    log:     the log of the forward, if one is kept, which lives as long as the graph
    """

    __slots__ = ("__weakref__", "bottoms", "call", "log")

    call: Call
    bottoms: list[Any]
    log: object


class Call:
    """One forward call of a unit; of a list of modules, one pass through them.

    graph:          its part of the graph; dead once the graph is
    entered, left:  moments of forward, of which the engine goes back through the latest first; of a list, ``left`` is its last module's
    begun, ended:   the graph task (one ``backward()``) in which its backward last began and ended on this rank
    again:          that backward made a graph of its own, through which a later one may come back
    is_watched:     an output needs a gradient, so that its backward will begin
    has_inputs:     an input needs a gradient, so that its backward has an end; known when its forward has ended
    log:            the number of the log that has the call, if one is kept
    segment:        number of the outermost checkpointed segment that it was in, if a log is kept
    begin_at, end_at: where its backward begins and ends there; the first is None while forward runs, and if no output needs a gradient
    """

    __slots__ = (
        "_counted",
        "_inputs_left",
        "again",
        "begin_at",
        "begun",
        "end_at",
        "ended",
        "entered",
        "graph",
        "has_inputs",
        "is_watched",
        "left",
        "log",
        "segment",
    )

    def __init__(self, part: GraphPart) -> None:
        part.call = self
        self.graph = weakref.ref(part)
        self.entered = self.left = next_moment()
        self.begun = self.ended = -1
        self.again = self.is_watched = self.has_inputs = False
        self.log: int | None = None
        self.segment: int | None = None
        self.begin_at: int | None = None
        self.end_at = -1
        self._counted = -1
        self._inputs_left = 0

    def will_pass_inputs(self, task: int) -> bool:
        """Whether the backward ``task``, which runs, reaches one of its inputs.

        If none needs a gradient that is unknown: yes for a call that was in no backward before, or has begun in this one.
        """
        part = self.graph()
        if part is None:
            return False
        if not part:
            return self.begun in (-1, task)
        return any(map(compat.will_run_in_this_backward, part))

    def will_end(self, task: int) -> bool:
        """Whether the backward ``task``, which runs, is still going to pass its inputs."""
        return self.ended != task and bool(self.graph()) and self.will_pass_inputs(task)

    def passes_last_input(self, task: int) -> bool:
        """One of its nodes runs: is it the last that runs in this backward? Yes, if its graph was freed while it ran."""
        part = self.graph()
        if part is None or len(part) == 1:
            return True
        if self._counted != task:
            self._counted = task
            self._inputs_left = sum(map(compat.will_run_in_this_backward, part))
        self._inputs_left -= 1
        return self._inputs_left == 0

    def is_in_this_backward(self) -> bool:
        """Whether this rank's backward, which is running, reaches its inputs, or its outputs if those need no gradient."""
        part = self.graph()
        return part is not None and any(map(compat.will_run_in_this_backward, (*part, *part.bottoms)))


class UnitCalls:
    """The forward calls of one unit; a new one replaces it when an iteration is dropped.

    running:  calls under way; None where no backward can follow
    awaiting: calls whose backward may come, for the first time or again
    to_run:   modules of a list that still have to run in this pass
    shared:   the call of all modules of a list that run in this pass
    to_rerun: how often backward may run modules of a list again that ran without a graph: a re-entrant checkpoint does
    """

    __slots__ = ("awaiting", "running", "shared", "to_rerun", "to_run")

    def __init__(self) -> None:
        self.running: list[GraphPart | None] = []
        self.awaiting: list[Call] = []
        self.to_run: set[nn.Module] = set()
        self.shared: GraphPart | None = None
        self.to_rerun: Counter[nn.Module] = Counter()

    def begin(self) -> GraphPart:
        """A forward call begins, with autograd."""
        part = GraphPart()
        call = Call(part)
        if self.awaiting:
            self._forget_old()
        self.awaiting.append(call)
        return part

    def _forget_old(self) -> None:
        """Forget calls whose graph is gone, or that had their backward.

        A recomputation in backward is no such call: others may have begun their backward and not ended it.
        """
        in_backward = compat.current_graph_task() != -1
        alive = [call for call in self.awaiting if call.graph() is not None]
        self.awaiting = [call for call in alive if in_backward or call.begun == -1 or call.again]

    def note_run(self, module: nn.Module, has_graph: bool, in_backward: bool) -> None:
        """``module``, one of a list, runs: a backward that has to come, or is under way, may run it again to have its graph."""
        times = self.to_rerun[module]
        if not in_backward:
            times += not has_graph
        elif has_graph:
            times -= 1
        else:
            times = max(times, 1)  # this is the recomputation of one checkpoint around another
        if times > 0:
            self.to_rerun[module] = times
        else:
            del self.to_rerun[module]

    def may_follow(self) -> bool:
        """Whether calls have a graph whose backward has not begun, or has begun and not ended."""
        return any((call.begun == -1 or call.ended != call.begun) and call.graph() is not None for call in self.awaiting)

    def end_pass(self) -> None:
        """The next module of the list that runs begins a new pass."""
        self.to_run.clear()
        self.shared = None
