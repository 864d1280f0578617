"""Order and prefetch: the life of one iteration.

A ``Unit`` is what one ``fully_shard`` call made: its modules and their parameter groups. A ``Schedule`` is shared by all units under
one root and decides when each is unsharded, resharded and reduced. It records the order in which units ran forward; later
iterations prefetch the next unit from that record, backward prefetches in the reverse of this iteration's order. It refuses to
know hooks, autograd graphs and buffers.

Note: order of collectives. Everything here is a function of what is equal on all ranks: the module structure, the order of forward
calls, and which calls a backward reaches. A unit's gradients are reduced when the backward of its last call in this graph has
passed its inputs, or at the end of backward, in reverse order of the units, if no input needs a gradient. What happened to
arrive decides nothing. (Measured: with a parameter unused on one rank, reducing on arrival lets two groups of equal shapes swap
their gradients without an error.)

Worked example, units a, b, c; the second iteration (R: reduce):

    forward    unshard a | prefetch b, run a | prefetch c, run b | run c
    backward   unshard c | prefetch b, c's backward | R c, prefetch a, b's backward | R b, a's backward | R a
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from ...errors import CompileError, OrderError, message
from .. import torch_compat as compat
from ..comm.streams import Event, Streams, streams_of
from ..group.memory import GroupState
from ..group.param_group import ParamGroup
from ..group.reduction import InFlight
from .caller import Caller
from .forward_log import ForwardLog, Reading
from .same_backward import Agreement
from .unit import Call, Unit, Visit

_unfinished: weakref.WeakSet[Schedule] = weakref.WeakSet()
"""Roots with reductions that compute is not ordered behind yet: the next backward that is the last of any root's iteration does it."""


class Schedule:
    """The iteration of all units under one root module."""

    _last_task: ClassVar[int] = -2  # in which a root's last backward ended: another root's, which it runs into, may end after it

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        self.root = root
        self.num_registrations = 0  # on managed modules, when parameters that are nobody's were last looked for
        self.settled = False  # True once the first forward has found all units below the root
        self.units = units  # in the order of named_modules(); the root first
        self._offloaded = [group for unit in units for group in unit.groups if group.options.offload]
        self.streams: Streams = streams_of(root.device)
        self.is_last_backward = True
        self.post_optim_event: Event = None
        self.max_reductions = 1  # reduce-scatter inputs in flight
        self.choose_max_reductions()
        self._keeps_logs = False
        self.choose_logs()
        self.automatic_prefetch = True
        # forward
        self.forward_root: Unit | None = None
        self._records: dict[Unit, list[Unit]] = {}  # for each unit whose forward began an iteration, the order of the last one
        self._recorded: list[Unit] = []  # the order of the last forward that began as this one
        self._recording: list[Unit] = []
        self._caller: Caller | None = None  # of the forward under way
        self._keeps_order = False  # this forward may be followed by a backward
        self._order: list[Unit] = []  # forward calls since the last backward, for backward prefetch
        self._num_ordered = 0  # before the forward under way
        self._open: list[Unit] = []  # prefetched and perhaps not waited for
        self._kept: dict[ParamGroup, tuple[int, int]] = {}  # unsharded between iterations, and the version of their shards
        self.kept_by_forward: set[Unit] = set()  # units that this forward left unsharded, or on the smaller mesh
        self._partial: list[Unit] = []  # lists of modules of which some ran in this forward, and others may not
        self.log: ForwardLog | None = None  # of the forward under way
        self._logs: list[weakref.ref[ForwardLog]] = []  # of forwards whose backward may come
        # backward
        self.agreement: Agreement | None = None  # made in the first forward
        self._reading: Reading | None = None  # of the backward under way
        self._task = -1  # graph task at whose end ``end_of_backward`` runs
        self._at_end: weakref.ref[Callable[[], None]] | None = None  # what that graph task calls then, and is the only one to hold
        self._waiting = False  # gradients of earlier backwards had not reached the sharded parameters when the last one began
        self._reductions: deque[InFlight] = deque()
        self._recomputed: list[tuple[Unit, int]] = []  # in this backward; and how many forwards of the unit were under way
        self._started: list[InFlight] = []  # since the last end of backward that finished them

    def choose_max_reductions(self) -> None:
        """One list holds them all, so the most generous of the units decides."""
        self.max_reductions = max(unit.max_reductions for unit in self.units)

    def choose_logs(self) -> None:
        """Ranks keep the order of each other's backward, whatever they leave out of it, if any unit asks for unused parameters."""
        self._keeps_logs = any(group.gradients.options.reduce_unused for unit in self.units for group in unit.groups)

    def alive_logs(self) -> list[ForwardLog]:
        """Of the forwards whose backward may come, in order."""
        return [log for reference in self._logs if (log := reference()) is not None]

    # --- forward ---

    def begin_forward(self, unit: Unit) -> None:
        """``unit`` is about to run: unshard it, then prefetch the next. Collective: yes."""
        in_backward = compat.current_graph_task() != -1  # recomputing a checkpointed segment
        if in_backward:
            # The first thing of ours that happens in this backward may be this recomputation, in the outermost graph task.
            self._expect_end_of_backward()
        elif self.forward_root is None:
            self._begin_iteration(unit)
        unit.issue()
        unit.wait()
        if in_backward:
            self._recomputed.append((unit, len(unit.running)))
            return
        recording = self._recording
        recording.append(unit)
        if unit.prefetch_forward:
            for other in unit.prefetch_forward:
                self._prefetch(other)
        elif self.automatic_prefetch:
            position = len(recording)
            recorded = self._recorded
            if position < len(recorded) and recorded[position - 1] is unit:
                self._prefetch(recorded[position])

    def keep(self, unit: Unit) -> None:
        """``unit`` is not fully resharded until the next forward, if nobody writes its shards before."""
        for group in unit.uses:
            self._kept[group] = group.shards_version()

    def _begin_iteration(self, unit: Unit) -> None:
        if self._has_failed_backward():
            self._end_failed_backward()
        for group, version in list(self._kept.items()):  # this forward may run only some of them
            group.take_over_toggles()
            if group.is_out_of_date(version):  # all ranks see that alike; whether one is HIDDEN may depend on who looked
                group.reshard_for_all()
                del self._kept[group]
        self.kept_by_forward.clear()
        self.forward_root = unit
        self._caller = Caller()
        self._num_ordered = len(self._order)
        self._recorded = self._records.get(unit, [])
        self._keeps_order = torch.is_grad_enabled()
        if self._keeps_logs:
            self.log = ForwardLog()
            self._logs = [reference for reference in self._logs if reference() is not None]
            self._logs.append(weakref.ref(self.log))
        if self.post_optim_event is not None:
            self.streams.order(self.streams.gather, self.post_optim_event)
            self.post_optim_event = None

    def _prefetch(self, unit: Unit) -> None:
        unit.issue()
        self._open.append(unit)

    def end_forward(self, unit: Unit, keep: bool = False) -> None:
        """``unit`` has run; free what backward does not need (``keep``: nothing). In a recomputation, backward does that."""
        if unit.running or compat.current_graph_task() != -1:  # ``running``: this was a call of it inside a call of it
            return
        for weight in unit.shrinking:
            weight.write_back()
        if unit.reshard_after_forward is True and unit is not self.root and not keep:  # by far the most common
            unit.reshard()
        else:
            self._free_after_forward(unit, keep)
        if self._keeps_order:
            unit.order_indices.append(len(self._order))
            self._order.append(unit)
        if self.forward_root is unit:
            self._end_iteration_forward()

    def _free_after_forward(self, unit: Unit, keep: bool) -> None:
        after = unit.reshard_after_forward
        if after is True:
            # A root is needed again as soon as backward begins; where none can follow, nothing must be left unsharded,
            # for clipping would then miss its parameters.
            if keep or (unit.reshard_is_default and unit is self.root and torch.is_grad_enabled()):
                self.keep(unit)
                self.kept_by_forward.add(unit)
            else:
                unit.reshard()
        elif not torch.is_grad_enabled() and unit.has_gradients():
            unit.reshard()  # no backward follows that would, and whoever looks for gradients must find them
        else:
            if after is not False:
                unit.reshard(to_smaller=True)
            self.keep(unit)
            self.kept_by_forward.add(unit)

    def end_failed_forward(self, unit: Unit) -> None:
        """The forward of ``unit`` raised: keep or free its parameters as if it had ended, for on other ranks it may have.

        Collective: no.
        """
        if unit.running or compat.current_graph_task() != -1:
            return
        is_root = self.forward_root is unit
        self._free_after_forward(unit, keep=False)
        if unit.shrinking:
            unit.reshard()  # what forward shrank, it shrank on this rank alone
        if any(group.state is GroupState.UNSHARDING for group in unit.uses):
            unit.release()
        if is_root:
            self._end_iteration_forward(failed=True)

    def end_interrupted_forward(self) -> None:
        """End a forward that something else than an ``Exception`` has ended, such as ctrl-C: torch calls no hook then."""
        if self.forward_root is None or compat.current_graph_task() != -1 or self._caller is None or self._caller.is_running():
            return
        for unit in reversed(self.units):  # the root last
            if unit.running:
                unit.running.clear()
                unit.end_pass()
                self.end_failed_forward(unit)
                unit.reshard()  # its shards may have been written since: nobody knows their version then

    def end_part(self, unit: Unit) -> None:
        """One module of the list that ``unit`` is has run, and others of it have not: they may follow in this forward."""
        if compat.current_graph_task() != -1:
            return
        if self.forward_root is unit:
            # Called by itself, for instance a head on one chunk of tokens: its backward or its next chunk is what follows.
            unit.end_pass()
            self.end_forward(unit, keep=self._keeps_order)
        else:
            self._partial.append(unit)

    def _end_iteration_forward(self, failed: bool = False) -> None:
        for unit in self._partial:
            if unit.to_run:
                unit.end_pass()
                self.end_forward(unit)
        self._partial.clear()
        assert self.forward_root is not None
        if failed:  # no backward follows, and the next forward runs what the last whole one ran
            del self._order[self._num_ordered :]
            for unit in self.units:
                unit.order_indices = [index for index in unit.order_indices if index < self._num_ordered]
        else:
            self._records[self.forward_root] = self._recording
        self._recording = []
        self.forward_root = self.log = self._caller = None
        self.close_leases()
        if not self._keeps_order:
            self._await_host_reads()

    def close_leases(self) -> None:
        """End the gathers that nobody waited for: after this, sharded parameters may be written."""
        for unit in self._open:
            for group in unit.uses:
                if group.state is GroupState.UNSHARDING or group.holders is not None:
                    unit.release()
                    break
        self._open.clear()

    def unshard_for_weights(self) -> None:
        """The flags of the next backward were set: see Note: weights differentiated apart. Collective: yes, over the shard axis."""
        if self.is_last_backward or self.forward_root is not None or compat.current_graph_task() != -1:
            return
        waiting = [unit for unit in self.units if unit.order_indices and not unit.micro_batch.reshards and not unit.reduces()]
        for unit in waiting:
            unit.issue()
        for unit in waiting:
            unit.wait()

    @compat.dynamo_disabled
    def before_listing(self) -> None:
        """Parameters are about to be listed, maybe on one rank alone: show those that gradients belong to.

        See ``FSDPModule.named_parameters``.
        """
        if self.forward_root is not None or compat.current_graph_task() != -1 or not self.is_last_backward:
            return  # whoever asks inside of forward and backward, or between micro-batches, gets what they compute with
        for unit in self.kept_by_forward:
            if unit.has_gradients():
                unit.hide()
        self.kept_by_forward.clear()

    def _await_host_reads(self) -> None:
        for group in self._offloaded:
            group.await_host_read()

    # --- backward ---

    def begin_backward(self, call: Call | None, unit: Unit) -> None:
        """The gradient of an output of ``call`` is there: unshard its unit, prefetch the one before. Collective: yes.

        call: None if this rank's backward leaves it out, and those of other ranks may not
        """
        if call is not None:
            task = compat.current_graph_task()
            if call.begun == task:
                return
            call.begun = task
            call.again = torch.is_grad_enabled()
            if self._task != task:
                self._expect_end_of_backward()
            if call.visit is not None and self._reading is not None and not self._reach(call.visit, is_end=False):
                if unit.unshard_in_backward:
                    unit.issue()
                    unit.wait()
                return
        for reduction in self._reductions:
            reduction.poll()
        for group in unit.uses:
            group.gradients.reached = True
        if unit.unshard_in_backward:
            unit.issue()
            unit.wait()
        if unit.prefetch_backward:
            for other in unit.prefetch_backward:
                if other.unshard_in_backward:
                    self._prefetch(other)
        elif unit.order_indices:
            index = unit.order_indices.pop()
            if index > 0 and index <= len(self._order) and self.automatic_prefetch and unit.backward_prefetch is not None:
                before = self._order[index - 1]
                if before.unshard_in_backward:
                    if unit.backward_prefetch == "pre":
                        self._prefetch(before)
                    else:
                        unit.prefetch_after = before

    def end_backward_of(self, call: Call | None, unit: Unit, visit: Visit | None) -> None:
        """The gradients of all inputs of ``call`` are done. Collective: yes, if it was its unit's last in this backward.

        call: None if its graph was freed while it ran; ``visit``: its place in the log, if there is one
        """
        task = compat.current_graph_task()
        if call is not None:
            if len(call.nodes) > 1 and not call.passes_last_input(task):
                return
            call.ended = task
        if visit is not None and self._reading is not None:
            if self._reach(visit, is_end=True):
                self._end_visit(visit)
            return
        if unit.to_run and task != self._task:
            return  # one module of a list was recomputed, in a backward of its own; the others follow, or the end of backward does
        if call is not None:
            if call.again or len(unit.calls) != 1 or unit.calls[0]() is not call:
                left = self._calls_left(unit, task)
                if left:
                    if unit.reshard_after_forward is not False and all(other.begun != task for other in left):
                        unit.reshard()
                    return
            else:
                unit.calls.clear()
        self._reduce(unit, at_end=False)

    def _reach(self, visit: Visit, is_end: bool) -> bool:
        """Before this moment, do what other ranks have done by now, if they left out less; False if it was done here as well."""
        assert self._reading is not None
        if (visit.ended if is_end else visit.begun) == self._task:
            return False
        for each, ends in self._reading.left_out_before(visit, is_end):
            self._do_for_others(each, ends)
        if is_end:
            visit.ended = self._task
        else:
            visit.begun = self._task
        return True

    def _do_for_others(self, visit: Visit, is_end: bool) -> None:
        if is_end:
            self._end_visit(visit)
        else:
            self.begin_backward(None, visit.unit)

    def _end_visit(self, visit: Visit) -> None:
        """``end_backward_of`` by the log, which is the same on all ranks; the engine knows only what this rank's backward reaches."""
        assert self._reading is not None
        unit = visit.unit
        left = self._reading.still_to_end(unit)
        if not left:
            self._reduce(unit, at_end=False)
        elif unit.reshard_after_forward is not False and all(other.begun != self._task for other in left):
            unit.reshard()

    def _calls_left(self, unit: Unit, task: int) -> list[Call]:
        """The calls of ``unit`` whose inputs this backward has not passed yet."""
        calls = [reference() for reference in unit.calls]
        return [call for call in calls if call is not None and call.ended != task and call.will_pass_inputs(task)]

    def _reduce(self, unit: Unit, at_end: bool) -> None:
        """Reduce the gradients of the unit's own groups: now those that nobody borrows, at the end of backward what is left."""
        taken = [
            (group.gradients, group.gradients.take())
            for group in reversed(unit.groups)
            if (group.gradients.is_waiting() if at_end else group.holders is None)
        ]
        if compat.functorch_is_active():  # the backward of a transform, to which parameters are constants
            taken = []
        if unit.micro_batch.reshards:
            # First, for the unsharded parameters' memory can then hold the reduce-scatter input.
            unit.reshard(to_smaller=unit.micro_batch.reshards_to_smaller)
        if unit.prefetch_after is not None:
            if not at_end:
                self._prefetch(unit.prefetch_after)
            unit.prefetch_after = None
        reductions = self._reductions
        for gradients, grads in taken:
            if not grads:
                continue
            while len(reductions) >= self.max_reductions:
                reductions.popleft().advance()
            buffer = gradients.collect(grads)
            if buffer is not None:
                reduction = gradients.reduce(buffer)
                reductions.append(reduction)
                self._started.append(reduction)
                del buffer
                reduction.poll()

    def _expect_end_of_backward(self) -> None:
        """Have ``end_of_backward`` run when the outermost graph task ends: the first to call this is in it."""
        if self._has_failed_backward():
            self._end_failed_backward()
        if self._task == -1:
            if self.agreement is not None and not compat.functorch_is_active():
                self.agreement.check()
            at_end = functools.partial(self.end_of_backward)
            if not compat.queue_end_of_backward(at_end):
                raise _compiled_autograd_error()
            for group in self._kept:
                group.take_over_toggles()
            self._at_end = weakref.ref(at_end)
            self._task = compat.current_graph_task()
            self._waiting = bool(self._started) or self._holds_unreduced()
            if self._logs:
                self._reading = Reading(self._task, self.alive_logs())

    def end_of_backward(self) -> None:
        """Reduce what has not been reduced, and finish; a pipeline schedule calls it when sync is on again. Collective: yes."""
        if self._reading is not None:
            for visit, is_end in self._reading.left_out_at_end():
                self._do_for_others(visit, is_end)
            self._reading = None
        task = self._task
        self._kept.clear()
        self._end_recomputations()
        self.kept_by_forward.clear()
        for unit in reversed(self.units):
            for group in unit.groups:
                if group.gradients.is_waiting():
                    self._reduce(unit, at_end=True)
                    break
            else:
                if unit.micro_batch.reshards:
                    unit.reshard(to_smaller=unit.micro_batch.reshards_to_smaller)
            if unit.micro_batch.reshards_to_smaller or not unit.micro_batch.reshards:
                self.keep(unit)
            if unit.to_run:  # of a recomputation that ran a part of the list
                unit.end_pass()
        self.close_leases()
        if self.is_last_backward:
            self._order.clear()
            for unit in self.units:
                unit.order_indices.clear()
            Schedule._last_task = task
        if self.is_last_backward or self.streams.host_waits or task == Schedule._last_task:
            self.finish_reductions()
            for schedule in _unfinished:
                schedule.finish_reductions()
            _unfinished.clear()
        else:  # gradients are there, in the order of the reduce stream
            _unfinished.add(self)
        self._await_host_reads()
        self._task = -1  # last: what raises here has made the backward fail

    def _has_failed_backward(self) -> bool:
        """Whether an exception ended the last backward, and nobody called ``reset``: the engine then dropped what it was to call."""
        return self._task != -1 and self._at_end is not None and self._at_end() is None

    def _holds_unreduced(self) -> bool:
        for unit in self.units:
            for group in unit.groups:
                if group.gradients.holds_unreduced:
                    return True
        return False

    def _end_failed_backward(self) -> None:
        """Drop what a failed backward has not handed out: ``zero_grad`` did not reach it, and it must not be added to a retry.

        Collective: no.
        Raises: OrderError if gradients of earlier micro-batches are among it: whether they are still wanted, nobody has said.
        """
        if self._waiting and (self._started or self._holds_unreduced()):
            raise OrderError(
                message(
                    "the last backward raised while gradients of earlier micro-batches waited to be reduced",
                    expected="the whole step to be dropped: a part of the failed backward was added to them",
                    fix="call model.reset_iter_state() or model.zero_grad() on the root, and begin the step again",
                )
            )
        for reduction in self._started:
            reduction.abandon()
        self._started.clear()
        self._reductions.clear()
        _unfinished.discard(self)
        for unit in self.units:
            for group in unit.groups:
                group.discard_gradients()
                group.reshard()
            unit.calls.clear()  # a traceback may keep their graph alive, on some ranks only
            unit.order_indices.clear()
        self._order.clear()
        self._open.clear()
        self._kept.clear()
        self.kept_by_forward.clear()
        self._end_recomputations()
        self._reading = None
        self._task = -1

    def _end_recomputations(self) -> None:
        """Non-reentrant checkpointing leaves a forward as soon as it has what it needs, and its post-hooks never run."""
        for unit, num_running in self._recomputed:
            del unit.running[num_running:]
        self._recomputed.clear()

    def finish_reductions(self) -> None:
        """After this, all sharded gradients are there, as compute sees them."""
        for reduction in self._started:
            reduction.finish()
        self._started.clear()
        self._reductions.clear()

    # --- recovery ---

    def check_root(self, unit: Unit, caller: str) -> None:
        if unit is not self.root:
            raise OrderError(
                message(
                    f"{caller} was called on {unit.fqn!r}, which is not a root",
                    expected=f"{caller} must be called on the root FSDP module, the one whose forward ran first",
                    fix="call it on the module that you run forward with",
                )
            )

    def reset(self) -> None:
        """Make the next iteration valid after an exception.

        What a failed backward has already added to earlier gradients nobody can take out again: then the whole step is discarded.
        """
        backward_failed = self._task != -1 or len(self._started) > 0
        for reduction in self._started:
            reduction.abandon()
        self._started.clear()
        self._reductions.clear()
        for unit in self.units:
            for group in unit.groups:
                group.discard_gradients()
                if backward_failed:
                    group.gradients.zero(set_to_none=True)
                group.reshard()
                group.await_host_read()
            unit.forget_calls()
        self._open.clear()
        self._kept.clear()
        self._recomputed.clear()
        self.kept_by_forward.clear()
        self._partial.clear()
        self._records.clear()  # ranks may have failed in different places, or because they went different ways
        self._order.clear()
        self._recording = []
        self.forward_root = self.log = self._reading = self._caller = None
        self._logs.clear()
        self._task = -1


def _compiled_autograd_error() -> CompileError:
    """There a parameter's gradient is put into place behind the end of backward: it would not be reduced, and nobody would notice."""
    return CompileError(
        message(
            "backward runs under compiled autograd",
            expected="torch.compile on modules, whose backward is compiled with them; the rest of backward by the usual engine",
            fix="leave torch._dynamo.config.compiled_autograd off; fsdp2.compile(model) has all of backward in one graph",
        )
    )
