"""The life of iterations: forwards and backwards begin, end, and fail.

All units under one root share a ``Schedule``, which begins and ends the root's forwards and backwards: a ``Forward`` or
a ``Backward`` decides when each unit is unsharded, resharded and reduced. The hooks on the user's modules and graphs
report here, and the schedule ends what an exception has left half done.

Worked example, units a, b, c; the second iteration (R: reduce):

    forward    unshard a | prefetch b, run a | prefetch c, run b | run c
    backward   unshard c | prefetch b, c's backward | R c, prefetch a, b's backward | R b, a's backward | R a
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch

from ...errors import CompileError, OrderError
from ...torch_names import torch_autograd, torch_compiler
from ..comm import collective_log
from ..comm.streams import Event
from ..group.param_group import GroupState
from . import late_comparison
from .backward import Backward, LoggedBackward
from .backward_agreement import Agreement
from .call import Call, UnitCalls
from .finalization import CommContext, GradientReductionHandle
from .forward import Forward
from .forward_log import ForwardLog
from .optional_units import OptionalForward, OptionalUnits
from .reductions import finish_all
from .unit import Unit
from .unit_tree import Iteration, UnitTree

_last_task = -2
"""The graph task in which a root's last backward ended. A backward of another root may contain it, and end after it."""


class Schedule:
    """The iterations of all units under one root module.

    settled:  the first forward has found all units below the root
    agreement: compares ranks before each backward; made when settled
    forward, backward: those under way, or None
    """

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        self.tree = UnitTree(root, units)
        self.settled = False
        self.is_last_backward = True
        self.share(CommContext())
        self._to_finalize = False  # a backward has begun in manual mode, and the user has not called ``finalize`` since
        self.post_optim_event: Event = None
        self._steps_in_graph = False  # that event was recorded while a graph was captured
        self._input_read: Event = None  # after the copy of the root's inputs to the device
        self.forward: Forward | None = None
        self.backward: Backward | None = None
        self._logs: list[weakref.ref[ForwardLog]] = []
        self._logs_forwards = False
        self.agreement: Agreement | None = None
        self.choose_max_reductions()
        self.choose_logs()
        self.note_guards()

    def share(self, context: CommContext) -> None:
        self.comm_ctx = context
        context.roots.add(self)

    def choose_max_reductions(self) -> None:
        """Set the limit of inputs in flight: one list holds the inputs of all units, so the largest limit counts."""
        self.tree.reductions.limit = max(unit.options.max_reductions for unit in self.tree.units)

    def choose_logs(self) -> None:
        """Keep logs if a unit is optional, or reduces unused parameters: each rank then knows the others' order."""
        groups = [group for unit in self.tree.units for group in unit.groups]
        found = OptionalUnits(self.tree)
        self._optional = found if found.units else None
        self._logs_forwards = self._optional is not None or any(
            group.gradients.options.reduce_unused for group in groups
        )

    def note_guards(self) -> None:
        """Keep logs in a guarded pass, too."""
        self._is_guarded = any(unit.guarded for unit in self.tree.units)

    def alive_logs(self) -> list[ForwardLog]:
        """The logs of forwards whose backward may come, in order."""
        logs = [log for reference in self._logs if (log := reference()) is not None] if self._logs else []
        if not logs and self._logs:
            self._logs = []
        return logs

    @property
    def goes_on(self) -> bool:
        """Whether the iteration continues after the next end of backward."""
        return self.tree.holds_pending or not self.is_last_backward

    @property
    def is_open(self) -> bool:
        """Whether a forward in grad mode has run whose iteration has not ended."""
        tree = self.tree
        return (
            self.forward is not None or self.backward is not None or bool(tree.reductions) or bool(tree.iteration.order)
        )

    # --- forward ---

    @property
    def precedes_backward(self) -> bool:
        """Whether a forward is under way that has a graph."""
        return self.forward is not None and self.forward.precedes_backward

    def begin_forward(self, unit: Unit) -> None:
        """``unit`` is about to run, in a forward or in the recomputation of a checkpointed segment. Collective: yes."""
        task = torch_autograd.current_graph_task()
        if task != -1:
            # This recomputation may be our first hook in the backward, while the outermost graph task runs.
            self._backward_of(task).begin_recomputation(unit)
            return
        forward = self.forward
        if forward is None:
            forward = self._begin_iteration(unit)
        forward.begin(unit)

    def _begin_iteration(self, unit: Unit) -> Forward:
        tree = self.tree
        self.comm_ctx.refuse_open("forward")
        late_comparison.compare()
        if self.backward is not None:  # no backward calls this forward, so that one raised
            self._end_failed_backward()
        if tree.iteration.unsharded and tree.streams.is_capturing():
            tree.refuse_gathers_of_before()
        tree.reshard_what_is_out_of_date()
        tree.iteration.left_by_forward.clear()
        log = None
        if (self._logs_forwards or self._is_guarded) and torch.is_grad_enabled():
            log = ForwardLog()
            self._logs = [*map(weakref.ref, self.alive_logs()), weakref.ref(log)]
        if self._optional is None:
            self.forward = Forward(tree, unit, log)
        else:
            self.forward = OptionalForward(tree, unit, log, self._optional)
        if self.post_optim_event is not None:
            self.await_optimizer()
        return self.forward

    def note_optimizer(self, event: Event) -> None:
        """An optimizer's step ends at ``event``."""
        self.post_optim_event = event
        self._steps_in_graph = self.tree.streams.is_capturing()

    def await_optimizer(self, on_compute: bool = False) -> None:
        """Gather after the event of ``set_post_optim_event``. on_compute: shards are read there as well"""
        event, self.post_optim_event = self.post_optim_event, None
        streams = self.tree.streams
        if streams.is_capturing() and not self._steps_in_graph:  # long past
            return
        for stream in (streams.copy_in, streams.gather, *((streams.compute,) if on_compute else ())):
            streams.order(stream, event)

    def end_forward(self, unit: Unit) -> None:
        """``unit`` has run. After a recomputation, backward frees what it does not need."""
        if (
            unit.calls.running or torch_autograd.current_graph_task() != -1
        ):  # ``running``: the call was inside another one
            return
        forward = self.forward
        if forward is None:  # the user reset it while it ran
            unit.reshard()
            return
        forward.end(unit)
        if forward.root is unit:
            self._finish_forward(forward)

    def end_part(self, unit: Unit) -> None:
        """One module of the list ``unit`` has run. Its other modules may follow in this forward."""
        forward = self.forward
        if forward is not None and torch_autograd.current_graph_task() == -1 and forward.end_part(unit):
            self._finish_forward(forward)

    def _finish_forward(self, forward: Forward, failed: bool = False) -> None:
        self.forward = None
        forward.finish(failed)
        if self._input_read is not None:
            self.await_host_input()

    def note_host_input(self) -> None:
        """An input is being copied from page-locked memory, which the user may refill when forward has returned.

        The copy is complete by then, unless the host is ahead of the device by more than a forward.
        """
        streams = self.tree.streams
        if not streams.is_capturing():  # a captured graph reads the input in each replay
            self._input_read = streams.mark(streams.compute)

    def await_host_input(self) -> None:
        """Block until inputs in page-locked memory may be refilled."""
        self.tree.streams.synchronize(self._input_read)
        self._input_read = None

    def end_failed_forward(self, unit: Unit) -> None:
        """The forward of ``unit`` raised: keep or free its parameters as if it had returned. Collective: no.

        On other ranks it may have returned.
        """
        if unit.calls.running or torch_autograd.current_graph_task() != -1:
            return
        if collective_log.current is not None:
            collective_log.current.fail("forward", unit.name)
        try:
            self.tree.reshard_after_forward(unit)
            if unit.max_norm_weights:
                unit.reshard()  # embeddings may have shrunk their rows in forward on this rank alone
            if any(group.state is GroupState.UNSHARDING for group in unit.uses):
                unit.release()
        finally:  # there may be no memory for shards over a smaller mesh
            if self.forward is not None and self.forward.root is unit:
                self._finish_forward(self.forward, failed=True)

    def end_interrupted_forward(self) -> None:
        """End a forward that something other than an ``Exception``, such as ctrl-C, ended: torch calls no hook."""
        if self.forward is None or torch_autograd.current_graph_task() != -1 or not self.forward.was_interrupted():
            return
        for unit in reversed(self.tree.units):  # the root last
            if unit.calls.running:
                unit.calls.running.clear()
                unit.calls.end_pass()
                self.end_failed_forward(unit)
                unit.reshard()  # its shards may have been written since, and their version at that time is unknown

    # --- between forward and backward ---

    def unshard_for_weights(self) -> None:
        """The user set flags of the next backward: see Note: weights differentiated apart.

        Collective: yes, over the shard axis.
        """
        if not self.goes_on or self.forward is not None or torch_autograd.current_graph_task() != -1:
            return
        positions = self.tree.iteration.positions
        ran = [unit for unit in self.tree.units if positions.get(unit)]
        waiting = [unit for unit in ran if not unit.micro_batch.reshards and not unit.micro_batch.reduces]
        for unit in waiting:
            unit.issue()
        for unit in waiting:
            unit.wait()

    @torch_compiler.dynamo_disabled
    def before_listing(self) -> None:
        """The user lists parameters, maybe on one rank alone: show the sharded ones, which have the gradients.

        See ``FSDPModule.named_parameters``.
        """
        if self.forward is not None or torch_autograd.current_graph_task() != -1 or self.goes_on:
            return  # the user gets the parameters that the module computes with
        left_by_forward = self.tree.iteration.left_by_forward
        for unit in left_by_forward:
            if unit.has_gradients():
                unit.hide()
        left_by_forward.clear()

    # --- backward ---

    def begin_backward(self, call: Call, unit: Unit) -> None:
        """An output of ``call`` has its gradient. Collective: yes."""
        task = torch_autograd.current_graph_task()
        if call.begun == task:
            return
        call.begun = task
        call.again = torch.is_grad_enabled()
        backward = self.backward
        if backward is None or backward.task != task:
            backward = self._backward_of(task)
        backward.begin(unit, call)

    def end_backward_of(self, call: Call, unit: Unit) -> None:
        """An input of ``call`` has its gradient. Collective: yes, if the call was its unit's last in this backward."""
        task = torch_autograd.current_graph_task()
        log = collective_log.current
        if log is not None:
            log.exit("backward", unit.name)
        (self.backward or self._backward_of(task)).end(unit, call, task)
        if log is not None:
            log.resume()

    def _backward_of(self, task: int) -> Backward:
        """The backward under way, which may contain ``task``; a new one if there is none, or if the last one failed."""
        if self.backward is not None and self.backward.task != task and self.backward.has_failed():
            self._end_failed_backward()
        if self.backward is not None:
            return self.backward
        tree = self.tree
        late_comparison.compare()
        if tree.iteration.unsharded:
            tree.note_changes_since_forward()
        if self.agreement is not None and not torch_autograd.functorch_is_active():
            self.agreement.check()
        at_end = functools.partial(self.end_of_backward)
        if not torch_autograd.queue_end_of_backward(at_end):
            # That engine writes gradients of parameters after the end of backward, where nothing would reduce them.
            raise CompileError(
                "backward runs under compiled autograd",
                expected="torch.compile on modules, whose backward is compiled with them; "
                "the rest of backward by the usual engine",
                fix="leave torch._dynamo.config.compiled_autograd off; fsdp2.compile(model) has all of backward in one "
                "graph",
            )
        logs = self.alive_logs()
        if logs or self._logs_forwards or self._is_guarded:
            self.backward = LoggedBackward(tree, task, at_end, logs)
        else:
            self.backward = Backward(tree, task, at_end)
        for follow in tree.followers:
            follow(self.backward)
        self._to_finalize = tree.holds_pending
        return self.backward

    def _backward_by_hand(self) -> Backward:
        """A backward that the user or a pipeline schedule ends: it only reduces what earlier backwards have left."""
        if self.agreement is not None:
            self.agreement.number_groups()
        return Backward(self.tree, -1, None)

    def end_of_backward(self) -> None:
        """Reduce what has not been reduced. Pipeline schedules call it when sync is on again. Collective: yes."""
        global _last_task
        tree = self.tree
        log = collective_log.current
        if log is not None:
            log.exit("backward", "")
        backward = self.backward or self._backward_by_hand()
        backward.finish(not self.goes_on, leaves_pending=tree.holds_pending)
        if not self.goes_on:
            _last_task = backward.task
        if not self.goes_on or tree.streams.host_waits or backward.task == _last_task:
            tree.reductions.finish()
            finish_all()
        else:
            tree.reductions.finish_later()
        tree.await_host_reads()
        if log is not None:
            log.leave()
        self.backward = None  # last, because an exception before this line makes the backward a failed one
        for watcher in tree.root.watchers:
            watcher()

    def _end_failed_backward(self) -> None:
        """Drop gradients that a failed backward has not handed out. Collective: no.

        ``zero_grad`` cannot reach them, and a retry would add to them.

        Raises: OrderError if gradients of earlier micro-batches are among them, because the user may still want those.
        """
        assert self.backward is not None
        if self.backward.lost_earlier_gradients():
            raise OrderError(
                "the last backward raised while gradients of earlier micro-batches waited to be reduced",
                expected="the whole step to be dropped: a part of the failed backward was added to them",
                fix="call model.reset_iter_state() or model.zero_grad() on the root, and begin the step again",
            )
        self.tree.reductions.abandon()
        for unit in self.tree.units:
            unit.drop()
            unit.calls.to_rerun.clear()
            unit.calls.awaiting.clear()  # a traceback may keep their graph alive, on some ranks only
        self.tree.iteration = Iteration()
        self.backward.end_recomputations()
        self.backward = None

    # --- an iteration that the user ends ---

    def set_manual(self, unit: Unit, manual: bool) -> None:
        """Let the user end iterations with ``finalize``, or not.

        Raises: OrderError if ``unit`` is not the root, or while an iteration is open
        """
        if self.settled:
            self.check_root(unit, "set_manual_backward_finalization")
        if manual is self.tree.holds_pending:
            return
        self.comm_ctx.refuse_open("set_manual_backward_finalization")
        if self._to_finalize or torch_autograd.current_graph_task() != -1:
            raise OrderError(
                "set_manual_backward_finalization cannot change mode after backward starts",
                expected="the same mode from the first backward of an iteration to its finalize_backward()",
                fix="call finalize_backward() or reset_iter_state() on the root before",
            )
        self.tree.holds_pending = manual

    def finalize(self, is_async: bool) -> GradientReductionHandle:
        """End the iteration: reduce and reshard what is pending, by the flags as they are now.

        Collective: yes, if anything is pending.
        Raises: OrderError outside of manual mode, inside of a backward, or while all-reduce is off
        """
        self.comm_ctx.refuse_open("finalizing backward again")
        problem = None
        if not self.tree.holds_pending:
            problem = "finalize_backward requires manual backward finalization"
        elif torch_autograd.current_graph_task() != -1:
            problem = "finalize_backward was called inside of a backward"
        elif any(
            group.mesh.replicate_group is not None and unit.micro_batch.reduces and not unit.micro_batch.all_reduces
            for unit in self.tree.units
            for group in unit.groups
        ):
            problem = "finalize_backward was called while all-reduce is off"
        if problem is not None:
            raise OrderError(
                problem,
                expected="set_manual_backward_finalization(True) before forward, "
                "and finalize_backward() after the last backward, with set_requires_all_reduce(True)",
                fix="call them in this order on the root",
            )
        if is_async:
            self.comm_ctx.refuse_others_work(self)
        if self.backward is not None:  # outside of a backward: it raised
            self._end_failed_backward()
        self._backward_by_hand().finish(is_last=True)
        self.tree.await_host_reads()
        self._to_finalize = False
        self.comm_ctx.handle = handle = GradientReductionHandle(self._end_finalization, self)
        return handle

    def _end_finalization(self) -> None:
        self.comm_ctx.handle = None
        self.tree.reductions.finish()
        finish_all()

    # --- recovery ---

    def check_root(self, unit: Unit, caller: str) -> None:
        if unit is not self.tree.root:
            raise OrderError(
                f"{caller} was called on {unit.fqn!r}, which is not a root",
                expected=f"{caller} must be called on the root FSDP module, the one whose forward ran first",
                fix="call it on the module that you run forward with",
            )

    def reset(self) -> None:
        """Make the next iteration valid after an exception.

        Gradients that a failed backward added to earlier ones cannot be taken out: then the whole step is dropped.
        """
        tree = self.tree
        handle = self.comm_ctx.handle
        if handle is not None:
            if handle.owner is not self:
                self.comm_ctx.refuse_open("reset_iter_state")
            handle.invalidate()
            self.comm_ctx.handle = None
        self._to_finalize = False
        backward_failed = self.backward is not None or bool(tree.reductions)
        tree.reductions.abandon()
        for unit in tree.units:
            unit.drop()
            for group in unit.groups:
                if backward_failed or group.options.semantics != "2.13":
                    group.gradients.zero(set_to_none=True)
                group.await_host_read()
            unit.calls = UnitCalls()
        tree.iteration = Iteration()
        tree.records.clear()  # ranks may have failed in different places, or because they ran different units
        self.forward = self.backward = None
        self._logs.clear()
