"""One backward of a root: it unshards each unit again, prefetches the one before, and reduces gradients after each.

Note: order of collectives. Everything here is a function of what is equal on all ranks: the module structure, the order
of forward calls, and which calls a backward reaches. A unit's gradients are reduced when the backward of its last call
in this graph has passed its inputs, or at the end of backward, in reverse order of the units, if no input needs a
gradient. The arrival of a gradient decides nothing. (Measured: with a parameter unused on one rank, reducing on arrival
lets two groups of equal shapes swap their gradients without an error.)

``Backward`` takes the order from this rank's own graph, which is equal on all ranks as long as every loss uses the same
outputs. ``LoggedBackward`` takes it from the log of the forward, which is equal whichever outputs the losses use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch.profiler import record_function

from ...torch_names import torch_autograd
from ..comm import collective_log
from .call import Call
from .forward_log import ForwardLog, Moment, Reading
from .unit import Unit, ahead
from .unit_tree import UnitTree, release


class Backward:
    """One backward under way, in the order of this rank's graph.

    task: id of the outermost graph task; -1 if no graph task runs, and this object only reduces what accumulated
    """

    def __init__(self, tree: UnitTree, task: int, at_end: Callable[[], None] | None) -> None:
        """at_end: the graph task calls it at its end; only that task holds it, and drops it if backward fails"""
        self.task = task
        self._tree = tree
        self._host_waits = tree.streams.host_waits  # see ``Forward``
        self._at_end = None if at_end is None else weakref.ref(at_end)
        self._waited_before = tree.has_unreduced()  # gradients of earlier backwards
        self._prefetched: list[Unit] = []
        self._prefetch_behind: dict[Unit, Unit] = {}  # what backward_prefetch="post" gathers after a unit's gradients
        # Units that are reduced at the end. At first, lists with modules that a re-entrant checkpoint runs again while
        # others have a graph: backward does not know which module ends the list.
        self._to_end = {unit for unit in tree.lists if unit.calls.to_rerun and unit.calls.may_follow()}
        self._recomputed: list[tuple[Unit, int]] = []  # with the number of its forwards under way at that time

    def has_failed(self) -> bool:
        """Whether an exception ended this backward: then the engine dropped ``at_end``, though maybe a moment later.

        Only another backward asks, because its graph task may be inside this one.
        """
        return self._at_end is not None and self._at_end() is None

    def lost_earlier_gradients(self) -> bool:
        """Whether gradients of earlier backwards wait among those of this backward."""
        return self._waited_before and self._tree.has_unreduced()

    # --- moments ---

    def begin(self, unit: Unit, call: Call) -> None:
        """An output of ``call`` has its gradient: unshard ``unit``, prefetch the one before. Collective: yes."""
        tree = self._tree
        log = collective_log.current
        if log is not None:
            log.enter("backward", unit.name)
        tree.reductions.poll()
        for group in unit.uses:
            group.gradients.reached = True
        options = unit.options
        if options.unshard_in_backward:
            tree.issue_for_backward(unit)
            if self._host_waits:
                unit.wait()
        iteration = tree.iteration
        others: Sequence[Unit] = ()
        if options.prefetch_backward and (unit.uses or unit is tree.root):  # see ``Forward.end``
            others = options.prefetch_backward
        elif positions := iteration.positions.get(unit):
            index = positions.pop()
            depth = options.backward_depth
            if index > 0 and depth.units > 0 and options.backward_prefetch is not None:
                before = iteration.order[index - 1]
                if options.backward_prefetch != "pre":
                    self._prefetch_behind[unit] = before
                elif depth.units == 1:  # by far the most common
                    others = (before,)
                else:
                    others = ahead(iteration.order[max(index - depth.units, 0) : index][::-1], depth)
                    others = [other for other in others if iteration.positions.get(other)]  # their backward is to come
        for other in others:
            if other.options.unshard_in_backward:
                self._prefetched.append(other)
                tree.issue_for_backward(other)
        if not self._host_waits and options.unshard_in_backward:
            unit.wait()
        if log is not None:
            log.resume()

    def end(self, unit: Unit, call: Call, task: int) -> None:
        """An input of ``call`` has its gradient. Collective: yes, if the call was its unit's last in this backward."""
        if not call.passes_last_input(task):
            return
        call.ended = task
        if task != self.task and self._may_follow(unit):
            return
        calls = unit.calls
        if not call.again and len(calls.awaiting) == 1 and calls.awaiting[0] is call:  # by far the most common
            left = []
        else:
            left = [other for other in calls.awaiting if other.ended != task and other.will_pass_inputs(task)]
        if not left:
            self.reduce(unit)
        elif all(other.begun != task for other in left):
            self._pause(unit)

    def _may_follow(self, unit: Unit) -> bool:
        """A re-entrant checkpoint has run ``unit`` again in a backward of its own: may other calls of it follow?

        It may have run one module of a list. A unit of one module in several such checkpoints is reduced after each.
        """
        return len(unit.modules) > 1 and unit.calls.may_follow()

    def keep_to_end(self, unit: Unit) -> None:
        """Reduce ``unit`` at the end, because a graph that a backward has made needs it.

        On a device, nodes of that graph may run after those that end the unit's calls: the device's thread counts its
        nodes anew, and the engine prefers higher numbers. On the CPU one thread counts all, and newer nodes run first.
        """
        self._to_end.add(unit)

    def _pause(self, unit: Unit) -> None:
        """Reshard ``unit`` until the backward of its next call, as no call of it is under way."""
        if unit.options.reshard_after_forward is not False and unit not in self._to_end:
            unit.reshard()

    def reduce(self, unit: Unit, at_end: bool = False) -> None:
        """Reduce the gradients of the unit's own groups. Groups that other units borrow wait until ``at_end``."""
        if not at_end and (unit.calls.to_rerun or unit in self._to_end):
            return
        taken = [
            (group.gradients, grads)
            for group in reversed(unit.groups)
            if (group.gradients.is_waiting() if at_end else group.holders is None)
            and not group.gradients.leave()
            and (grads := group.gradients.take())
        ]
        if torch_autograd.functorch_is_active():  # in the backward of a transform, parameters are constants
            taken = []
        if unit.micro_batch.reshards:
            # First, because the unsharded parameters' memory can then hold the reduce-scatter input.
            unit.reshard(to_smaller=unit.micro_batch.reshards_to_smaller)
        if self._prefetch_behind:
            before = self._prefetch_behind.pop(unit, None)
            if before is not None and not at_end and before.options.unshard_in_backward:
                self._prefetched.append(before)
                self._tree.issue_for_backward(before)
        if taken and torch_autograd.profiler_is_on():
            with record_function(f"FSDP::reduce ({unit.fqn or 'root'})"):
                self._tree.reductions.start(taken)
        elif taken:
            self._tree.reductions.start(taken)

    def begin_recomputation(self, unit: Unit) -> None:
        """``unit`` runs forward again, to recompute a checkpointed segment. Collective: yes."""
        unit.issue()
        unit.wait()
        self._recomputed.append((unit, len(unit.calls.running)))

    def end_recomputations(self) -> None:
        """End recomputations that non-reentrant checkpointing left early: their post-hooks never run."""
        for unit, num_running in self._recomputed:
            del unit.calls.running[num_running:]
        self._recomputed.clear()

    # --- its end ---

    def finish(self, is_last: bool, leaves_pending: bool = False) -> None:
        """Reduce what has not been reduced. Collective: yes.

        leaves_pending: the user will finalize: gradients that no hook has reduced stay as they are
        """
        tree = self._tree
        self.end_recomputations()
        tree.iteration = tree.iteration.after_backward(is_last)
        for unit in reversed(tree.units):
            pends = False
            for group in unit.groups:
                if group.gradients.is_waiting():
                    pends = leaves_pending and unit.micro_batch.reduces
                    if not pends:
                        self.reduce(unit, at_end=True)
                    break
            else:
                if unit.micro_batch.reshards:
                    unit.reshard(to_smaller=unit.micro_batch.reshards_to_smaller)
            if pends or unit.micro_batch.reshards_to_smaller or not unit.micro_batch.reshards:
                tree.leave_unsharded(unit)
            if unit.calls.to_run:  # left by a recomputation that ran a part of the list
                unit.calls.end_pass()
            if is_last and unit.calls.to_rerun:
                unit.calls.to_rerun.clear()
        release(self._prefetched)


class LoggedBackward(Backward):
    """One backward under way, in the order of the logs of its forwards, which is the same on all ranks.

    The engine knows only this rank's graph. So before each moment, this object does what other ranks have done by then.

    last: the unit whose backward began last, in this rank's graph
    """

    last: Unit | None = None

    def __init__(self, tree: UnitTree, task: int, at_end: Callable[[], None], logs: Sequence[ForwardLog]) -> None:
        super().__init__(tree, task, at_end)
        # Which graphs are alive may differ between ranks, so that does not count here.
        self._to_end = {unit for unit in tree.lists if unit.calls.to_rerun}
        self._reading = Reading(task, logs)

    def begin(self, unit: Unit, call: Call) -> None:
        self.last = unit
        if call.log is None:
            super().begin(unit, call)
        elif not self._reading.is_done(call, is_end=False):
            self._do_for_others(self._reading.reach(call, is_end=False))
            super().begin(unit, call)
        elif unit.options.unshard_in_backward:  # unsharded for other ranks; it may have been resharded since
            unit.issue()
            unit.wait()

    def end(self, unit: Unit, call: Call, task: int) -> None:
        if call.log is None:
            super().end(unit, call, task)
        elif call.passes_last_input(task):
            call.ended = task
            if not self._reading.is_done(call, is_end=True):
                self._do_for_others(self._reading.reach(call, is_end=True))
                self._end_logged(unit)

    def _may_follow(self, unit: Unit) -> bool:
        return bool(self._reading.calls_left(unit)) or super()._may_follow(unit)

    def begin_recomputation(self, unit: Unit) -> None:
        self._do_for_others(self._reading.before_recomputation(unit))
        super().begin_recomputation(unit)

    def _do_for_others(self, moments: Iterable[Moment]) -> None:
        for moment in moments:
            if moment.is_end:
                self._end_logged(moment.unit)
            else:
                super().begin(moment.unit, moment.call)

    def _end_logged(self, unit: Unit) -> None:
        """A call of ``unit`` has passed its inputs, on this rank or on others."""
        left = self._reading.calls_left(unit)
        if not left:
            self.reduce(unit)
        elif not any(self._reading.is_done(other, is_end=False) for other in left):
            self._pause(unit)

    def finish(self, is_last: bool, leaves_pending: bool = False) -> None:
        self._do_for_others(self._reading.left_out_at_end())
        super().finish(is_last, leaves_pending)
