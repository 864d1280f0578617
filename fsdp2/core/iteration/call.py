"""One forward call of a unit: when it began and ended, and what backwards have done with it.

A part of autograd's graph belongs to each call: the nodes that its inputs pass through. That part lives as long as the
graph, whose hooks hold it. The call itself is a record that only refers to the part, so that lists and logs may keep
the record without keeping the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

from torch import nn

from ...torch_names import torch_autograd

next_moment = itertools.count().__next__
"""Numbers for the beginnings and ends of forward calls, in their order. Calls of other ranks get fractions between."""


class GraphPart(list[Any]):
    """The graph nodes that a call's inputs pass through: one for each input that needs a gradient.

    A node runs when the gradient of its input is done.

    call:    the call that they belong to
    bottoms: nodes below the call's outputs; every backward that reaches one of the outputs runs at least one of them.
             Kept only if there is a log, and only of a call that began the forward or has no input that needs a
             gradient. The outputs' own nodes are not among them, because those hold this object.
    log:     the log of the forward, if there is one: it lives as long as the graph
    """

    call: Call
    bottoms: list[Any]
    log: object


class Call:
    """One forward call of a unit; for a list of modules, one pass through them.

    graph:          its part of the graph; a dead reference once the graph is gone
    entered, left:  moments of forward; a backward goes through the latest first. A list is left when its last module is
    begun, ended:   the graph task (one ``backward()``) in which its backward last began and ended on this rank
    again:          the backward made a graph of its own, through which a later backward may come back
    is_watched:     an output needs a gradient, so that its backward will begin; False while forward runs
    has_inputs:     an input needs a gradient, so that its backward has an end; known once ``is_watched``
    log:            the log that has the call, if there is one
    segment:        number of the outermost checkpointed segment in which it began, if there is a log
    may_rerun:      it ran in a checkpointed segment, or a module of its list did, if there is a log
    """

    def __init__(self, part: GraphPart) -> None:
        part.call = self
        self.graph = weakref.ref(part)
        self.entered: float = next_moment()
        self.left: float = self.entered
        self.begun = self.ended = -1
        self.again = self.is_watched = self.has_inputs = self.may_rerun = False
        self.log: weakref.ref[Any] | None = None
        self.segment: int | None = None
        self._counted = -1
        self._inputs_left = 0

    def holds(self, other: Call) -> bool:
        """Whether ``other``, which began later, was a part of this call."""
        return self.is_watched and other.is_watched and other.left < self.left

    def will_pass_inputs(self, task: int) -> bool:
        """Whether the backward ``task``, which runs, reaches one of the call's inputs.

        If no input needs a gradient, the graph cannot tell: True if it began in no backward yet, or in this one.
        """
        part = self.graph()
        if part is None:
            return False
        if not part:
            return self.begun in (-1, task)
        return any(map(torch_autograd.will_run_in_this_backward, part))

    def will_end(self, task: int) -> bool:
        """Whether the backward ``task``, which runs, has yet to pass the call's inputs."""
        return self.ended != task and bool(self.graph()) and self.will_pass_inputs(task)

    def passes_last_input(self, task: int) -> bool:
        """Whether the node that runs is the call's last in this backward; True also if the graph is gone."""
        part = self.graph()
        if part is None or len(part) == 1:
            return True
        if self._counted != task:
            self._counted = task
            self._inputs_left = sum(map(torch_autograd.will_run_in_this_backward, part))
        self._inputs_left -= 1
        return self._inputs_left == 0

    def is_in_this_backward(self) -> bool:
        """Whether this rank's backward reaches the call's inputs, or, if none needs a gradient, its outputs."""
        part = self.graph()
        return part is not None and any(map(torch_autograd.will_run_in_this_backward, (*part, *part.bottoms)))


class UnitCalls:
    """The forward calls of one unit. A new object replaces this one when an iteration is dropped.

    running:  calls under way; None for a call that no backward can follow
    awaiting: calls whose backward may come, for the first time or again
    to_run:   modules of a list that have not run in this pass yet
    shared:   the call of all modules of a list that run in this pass
    to_rerun: how often backward may run modules of a list again that a re-entrant checkpoint ran without a graph
    """

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
        awaiting = self.awaiting
        in_backward = torch_autograd.current_graph_task() != -1
        if (
            len(awaiting) == 1
            and awaiting[0].begun == awaiting[0].ended != -1
            and not (awaiting[0].again or in_backward)
        ):
            awaiting.clear()  # by far the most common
        elif awaiting:
            self._forget_old(in_backward)
        self.awaiting.append(call)
        return part

    def _forget_old(self, in_backward: bool) -> None:
        """Forget calls whose graph is gone, or that had their backward.

        A recomputation in backward forgets none: other calls may have begun their backward and not ended it.
        """
        alive = [call for call in self.awaiting if call.graph() is not None]
        self.awaiting = [call for call in alive if in_backward or call.begun == -1 or call.again]

    def note_run(self, module: nn.Module, has_graph: bool, in_backward: bool) -> None:
        """``module``, one of a list, runs: this backward or a later one may run it again to make its graph."""
        times = self.to_rerun[module]
        if not in_backward:
            times += not has_graph
        elif has_graph:
            times -= 1
        else:
            times = max(times, 1)  # this run is the recomputation of one checkpoint around another
        if times > 0:
            self.to_rerun[module] = times
        else:
            del self.to_rerun[module]

    def may_follow(self) -> bool:
        """Whether there are calls whose backward has not begun, or has begun and not ended."""
        return any(
            (call.begun == -1 or call.ended != call.begun) and call.graph() is not None for call in self.awaiting
        )

    def end_pass(self) -> None:
        """End the pass: the next module of the list that runs begins a new one."""
        self.to_run.clear()
        self.shared = None
