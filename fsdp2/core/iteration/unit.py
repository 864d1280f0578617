"""A unit: what one ``fully_shard`` call made, its modules and their parameter groups; and one forward call of it.

A group belongs to one unit. Another unit *borrows* it if one of its modules is tied to a parameter of the group; the group is then
unsharded from the first of its users to the last, and reduced once, at the end of backward, when all uses have added their
gradients. This file refuses to know when anything happens.

Worked example: an embedding with a unit of its own, and a head in the root that is tied to it:

    the root borrows the embedding's group; ``model.head.weight is model.embedding.weight`` at every moment
    forward: the root unshards it, the embedding's end leaves it alone (the root still needs it), the root's end reshards it
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .. import torch_compat as compat
from ..group.max_norm import shrinking_weights
from ..group.micro_batch import MicroBatch
from ..group.param import Owner
from ..group.param_group import ParamGroup

_moments = itertools.count()
"""Numbers for the beginnings and ends of forward calls, in the order in which they happen."""


class Call:
    """One forward call of a unit (of a list of modules: one pass through them), alive as long as its autograd graph.

    nodes:  the graph nodes that its inputs pass through, one for each input that needs a gradient: a node runs when the gradient
            of its input is done
    entered, left:  moments of forward, of which the engine goes back through the latest first; of a list, ``left`` is its last module's
    begun, ended:  the graph task (one ``backward()``) in which its backward last began and ended
    again:  that backward made a graph of its own, through which a later one may come back
    is_watched:  an output needs a gradient, so that its backward will begin
    bottoms:  graph nodes below its outputs, of which one runs at least in every backward that reaches one of these; only if a log is
            kept, and only of the call that began the forward. Not the outputs' own nodes: these hold the call.
    log, visit:  the log of this forward, if one is kept, which lives as long as the graph; and the call's place there
    """

    __slots__ = (
        "__weakref__",
        "_counted",
        "_inputs_left",
        "again",
        "begun",
        "bottoms",
        "ended",
        "entered",
        "is_watched",
        "left",
        "log",
        "nodes",
        "unit",
        "visit",
    )

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.nodes: list[Any] = []
        self.bottoms: list[Any] = []
        self.entered = self.left = next(_moments)
        self.begun = -1
        self.ended = -1
        self.again = False
        self.is_watched = False
        self.log: object = None
        self.visit: Visit | None = None
        self._counted = -1
        self._inputs_left = 0

    def leave(self) -> None:
        """Its forward has ended."""
        self.left = next(_moments)

    def will_pass_inputs(self, task: int) -> bool:
        """Whether the backward ``task``, which runs, reaches one of its inputs.

        If none needs a gradient that is unknown: yes for a call that was in no backward before, or has begun in this one.
        """
        if not self.nodes:
            return self.begun in (-1, task)
        return any(compat.will_run_in_this_backward(node) for node in self.nodes)

    def passes_last_input(self, task: int) -> bool:
        """One of its nodes runs: is it the last that runs in this backward?"""
        if self._counted != task:
            self._counted = task
            self._inputs_left = sum(map(compat.will_run_in_this_backward, self.nodes))
        self._inputs_left -= 1
        return self._inputs_left == 0


class Visit:
    """One forward call of a unit as the log knows it; it outlives the call's autograd graph, which may be freed on some ranks only.

    log:  number of the log
    has_inputs:  an input needs a gradient, so that its backward has an end
    end_at, begin_at:  its moments in the log; the second is None while forward runs, and if no output needs a gradient
    begun, ended:  the backward (id of the outermost graph task) in which these moments came last
    """

    __slots__ = ("begin_at", "begun", "call", "end_at", "ended", "has_inputs", "log", "unit")

    def __init__(self, log: int, call: Call, end_at: int) -> None:
        self.log = log
        self.unit = call.unit
        self.call = weakref.ref(call)
        self.has_inputs = False
        self.end_at = end_at
        self.begin_at: int | None = None
        self.begun = -1
        self.ended = -1

    def has_end(self) -> bool:
        return self.has_inputs and self.begin_at is not None

    def will_end_itself(self) -> bool:
        """Whether this rank's backward, which is running, is still going to pass its inputs."""
        call = self.call()
        task = compat.current_graph_task()
        return call is not None and call.ended != task and bool(call.nodes) and call.will_pass_inputs(task)

    def is_in_this_backward(self) -> bool:
        """Whether this rank's backward, which has just begun, reaches its inputs, or one of its outputs if it began the forward."""
        call = self.call()
        return call is not None and any(map(compat.will_run_in_this_backward, (*call.nodes, *call.bottoms)))


class Unit:
    """What one ``fully_shard`` call made.

    groups:                 its own
    uses:                   its own and those it borrows
    reshard_after_forward:  True, False, or a number of ranks: each group then reshards to its own ``smaller`` mesh
    reshard_is_default:     the user left it to us: a root then keeps its parameters from forward to backward
    number:                 among the units over the same ranks, in the order of ``fully_shard`` calls; a copy has its original's
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Iterable[ParamGroup],
        borrowed: Iterable[ParamGroup],
        device: torch.device,
        mp_policy: Any,
        reshard_after_forward: bool | int,
        reshard_is_default: bool,
    ) -> None:
        self.modules = tuple(modules)
        self.groups = list(groups)
        self.uses = [*self.groups, *borrowed]
        self.shrinking = shrinking_weights(self.groups)
        self.device = device
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_is_default = reshard_is_default
        self.micro_batch = MicroBatch()
        self.accumulates_whole = False  # over micro-batches gradients stay unsharded, without communication
        self.unshard_in_backward = True
        self.ignored: list[Owner] = []  # where parameters are that the user takes care of
        self.max_reductions = 1  # reduce-scatter inputs in flight; the largest of all units counts
        self.prefetch_forward: Sequence[Unit] = []
        self.prefetch_backward: Sequence[Unit] = []
        self.fqn = ""
        self.number = 0
        self.summoned = False  # its modules show whole parameters that are not its own; forward takes them as they are
        self.backward_prefetch: Literal["pre", "post"] | None = "pre"  # before its gradients are computed, after that, or not at all
        self.prefetch_after: Unit | None = None  # what "post" is to gather, in the backward under way
        self.running: list[Call | None] = []  # forward calls under way; None where no backward can follow
        self.to_run: set[nn.Module] = set()  # modules of a list that still have to run in this pass
        self.shared_call: Call | None = None  # of all modules of a list that run in this pass
        self.calls: list[Any] = []  # weak references to Calls whose backward may come, for the first time or again
        self.order_indices: list[int] = []  # its places in this iteration's order of forward calls
        for group in self.borrowed:
            group.holders = group.holders or set()

    @property
    def borrowed(self) -> list[ParamGroup]:
        return self.uses[len(self.groups) :]

    def set_micro_batch(self, micro_batch: MicroBatch) -> None:
        """From the next backward on, do what ``micro_batch`` says."""
        self.micro_batch = micro_batch
        for group in self.groups:
            group.gradients.micro_batch = micro_batch

    def issue(self, copy: bool = False) -> None:
        """Start unsharding. Collective: yes, over the shard axis."""
        for group in self.uses:
            group.issue(copy)
            if group.holders is not None:
                group.holders.add(self)

    def wait(self) -> None:
        for group in self.uses:
            group.wait()

    def release(self) -> None:
        """End gathers that nobody has waited for."""
        for group in self.uses:
            if group.holders is not None:
                group.holders.discard(self)
                if not group.holders:
                    group.reshard()
            else:
                group.release()

    def reshard(self, to_smaller: bool = False) -> None:
        """Reshard what no other unit holds; each group to its smaller mesh, if that is asked for and it has one."""
        for group in self.uses:
            if group.holders is not None:
                group.holders.discard(self)
                if group.holders:
                    continue
            if to_smaller and group.smaller is not None:
                group.reshard_to(group.smaller)
            else:
                group.reshard()

    def reshard_for_all(self) -> None:
        """Reshard whoever holds it: the user's modules must show sharded parameters now."""
        for group in self.uses:
            group.reshard_for_all()
            group.await_host_read()

    def hide(self) -> None:
        """The user's modules show sharded parameters; what is unsharded stays so, if a backward comes next."""
        for group in self.uses:
            group.hide()

    def end_pass(self) -> None:
        """The next module of the list that runs begins a new pass."""
        self.to_run.clear()
        self.shared_call = None

    def forget_old_calls(self) -> None:
        """Another forward call begins: forget calls whose graph is gone, or that had their backward.

        A recomputation in backward is no such call: others may have begun their backward and not ended it.
        """
        calls = [(reference, call) for reference in self.calls if (call := reference()) is not None]
        in_backward = compat.current_graph_task() != -1
        self.calls = [reference for reference, call in calls if in_backward or call.begun == -1 or call.again]

    def forget_calls(self) -> None:
        """No forward is under way, and no backward will come."""
        self.end_pass()
        self.running.clear()
        self.calls.clear()
        self.order_indices.clear()

    def has_gradients(self) -> bool:
        return any(param.sharded.grad is not None for group in self.groups for param in group.params)

    def reduces(self) -> bool:
        """Whether a backward reduces gradients of its own."""
        return self.micro_batch.reduces

    def notice_changes(self, more_may_come: bool = False) -> None:
        """Parameters may have been moved or cast: take them over now, so that memory holds one group more at most.

        more_may_come: the modules of a list are cast one after another; a group that is half cast waits for its last module. If
                       that never comes, the next unshard refuses it.
        Raises:        ParameterError naming the parameters of a group that is half cast
        """
        for group in self.groups:
            if not group.registry.verify() and not (more_may_come and group.has_mixed_dtypes()):
                group.rebuild()
                group.registry.show([param.sharded for param in group.params])  # ``_apply`` unties what it replaces
