"""A forward and backward that an exception has ended on this rank: it goes on without computing, as other ranks wait.

Each pass notes when modules of units begin and end forward. The pass before tells which of these moments a failed pass
still lacks. This rank runs the same hooks for them, with tensors of one element, so that it gathers and reduces in the
order of the other ranks. Backward follows the log of forward (``forward_log.py``). This rank drops its gradients before
they are reduced.

Worked example, units a and b in a root; a raises on this rank

    the pass before   begin root, begin a, end a, begin b, end b, end root, backward
    this pass         begin root, begin a
    served            end a, begin b (gathers b), end b, end root; backward: gathers and reduces b, a, root
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.group.options import MicroBatch
from ..core.iteration.backward import LoggedBackward
from ..core.iteration.call import Call, GraphPart
from ..core.iteration.forward_log import ForwardLog
from ..core.iteration.module_state import ModuleState
from ..core.iteration.schedule import Schedule
from ..core.iteration.unit import Unit
from ..errors import OrderError
from ..torch_names import torch_autograd


class _Moment(NamedTuple):
    """A module begins or ends forward, or a backward has ended (kind: "begin", "end", "backward").

    unit, module: their places; of a backward, the root's
    has_graph:    the module runs with autograd
    """

    kind: str
    unit: int
    module: int = 0
    has_graph: bool = False


class GuardedPass:
    """Passes of the units of a model, one at a time."""

    def __init__(self, units: Sequence[ModuleState]) -> None:
        self._units = units
        self._places = {unit: place for place, unit in enumerate(units)}
        self._known: dict[bool, list[tuple[_Moment, bool]]] = {}  # the last whole pass with grad mode, and without
        self._never: str | None = None  # why no pass can be served
        self._undo = contextlib.ExitStack()
        self._start()

    def _start(self) -> None:
        self._moments: list[_Moment] = []
        self._calls: list[Call | None] = []  # for each moment
        self._open: list[tuple[ModuleState, nn.Module]] = []
        self._failed: list[Callable[[], None]] = []  # what the hooks do after failed forwards, if the pass is not served
        self._logs: dict[ForwardLog, None] = {}  # of forwards since the last backward
        self._micro_batches: list[MicroBatch] = [unit.micro_batch for unit in self._units]
        declared = [unit for unit in self._units if unit.options.optional]
        self._optional = {each for unit in declared for module in unit.modules for each in module.modules()}
        self._has_graph = torch.is_grad_enabled()

    def begin(self) -> None:
        """A pass begins: note what it does."""
        if any(unit.hooks.are_called_by_others for unit in self._units):
            raise OrderError(
                "a guarded pass has begun inside of another",
                expected="each guard of a model to be left before the next one is entered",
                fix="put the whole pass into one `with guard:`",
            )
        self._start()
        with contextlib.ExitStack() as undo:
            for unit in self._units:
                hooks = (self._before, self._after, self._note_failure)
                undo.enter_context(unit.hooks.called_by(*(functools.partial(each, unit) for each in hooks)))
                undo.callback(setattr, unit, "watchers", unit.watchers)
                unit.watchers = (*unit.watchers, functools.partial(self._after_backward, unit))
            self._undo = undo.pop_all()
        self._keep_logs(True)

    def stop(self) -> None:
        """The pass is over. After an exception ``serve`` or ``give_up`` follows, then ``forget``."""
        self._undo.close()

    def forget(self) -> None:
        self._keep_logs(False)
        self._moments, self._calls, self._open, self._logs = [], [], [], {}

    def _keep_logs(self, guarded: bool) -> None:
        for unit in self._units:
            unit.guarded = guarded
        for schedule in {unit.schedule for unit in self._units}:
            if schedule is not None:
                schedule.note_guards()

    # --- what a pass does ---

    def _before(self, unit: ModuleState, hook: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch_autograd.current_graph_task() != -1:  # a recomputation
            return hook(module, args, kwargs)
        self.give_up()  # the program has caught the exception itself
        if unit.micro_batch is not self._micro_batches[self._places[unit]]:
            raise OrderError(
                "the gradient sync has changed inside of a guarded pass",
                expected="fsdp2.accumulate around `with guard:`, for it is over when an exception leaves it",
                fix="write: with fsdp2.accumulate(model, last=...), guard: ...",
            )
        given = hook(module, args, kwargs)
        part = unit.calls.running[-1] if unit.calls.running else None
        self._open.append((unit, module))
        self._note("begin", unit, module, part)
        return given

    def _after(self, unit: ModuleState, hook: Callable[..., Any], module: nn.Module, args: Any, output: Any) -> Any:
        if torch_autograd.current_graph_task() != -1:
            return hook(module, args, output)
        if output is None and torch_autograd.a_module_has_failed():
            unit.hooks.end_failed_forward()
            return None
        self.give_up()
        part = unit.calls.running[-1] if unit.calls.running else None
        given = hook(module, args, output)
        if self._open:
            self._open.pop()
        self._note("end", unit, module, part)
        return given

    def _note(self, kind: str, unit: ModuleState, module: nn.Module, part: GraphPart | None) -> None:
        self._note_log(unit)
        if part is None and self._has_graph and torch_autograd.in_reentrant_checkpoint():
            self._never = "a re-entrant checkpoint holds a sharded module, whose backward nobody can follow"
        if module not in self._optional:
            self._moments.append(_Moment(kind, self._places[unit], unit.modules.index(module), part is not None))
            self._calls.append(None if part is None else part.call)

    def _note_log(self, unit: ModuleState) -> None:
        forward = None if unit.schedule is None else unit.schedule.forward
        if forward is not None and forward.log is not None:
            self._logs[forward.log] = None

    def _note_failure(self, unit: ModuleState, hook: Callable[[], None]) -> None:
        self._failed.append(hook)

    def _after_backward(self, unit: ModuleState) -> None:
        if not self._known and any(log.gathers_in_other_order(_is_gathered) for log in self._logs):
            self._never = "a checkpointed segment holds several sharded modules: only its recomputation has their order"
        if not self._logs or not all(log.was_in_a_backward() for log in self._logs):
            self._never = "a backward ran again, or left out a forward, so nobody knows which forwards other ranks are in"
        self._moments.append(_Moment("backward", self._places[unit]))
        self._calls.append(None)
        self._logs.clear()

    def complete(self) -> None:
        """The pass has ended without an exception: the next one goes the same way, or cannot be served."""
        self.give_up()
        needs = [
            call is not None and (call.has_inputs if moment.kind == "begin" else call.is_watched)
            for moment, call in zip(self._moments, self._calls, strict=True)
        ]
        whole = list(zip(self._moments, needs, strict=True))
        if self._known.setdefault(self._has_graph, whole) != whole:
            self._never = _ANOTHER_ORDER

    # --- after an exception ---

    @property
    def place(self) -> str:
        """Where the pass is: "forward of blocks.1"."""
        if self._open:
            return f"forward of {self._open[-1][0].name}"
        backward = None if self._units[0].schedule is None else self._units[0].schedule.backward
        if isinstance(backward, LoggedBackward) and backward.last is not None:
            return f"backward, after that of {backward.last.name} had begun"
        if self._moments and self._moments[-1].kind == "backward":
            return "the code after backward"
        return "the loss" if self._moments else "the code before forward"

    def give_up(self) -> None:
        """End failed forwards as without a guard."""
        for end in self._failed:
            end()
        if self._failed:
            self._open = [each for each in self._open if each[0].calls.running]
        self._failed.clear()

    def why_not_served(self, error: Exception) -> str | None:
        """Why this rank cannot go on after ``error``; None if it can."""
        trace, known = error.__traceback__, self._known.get(self._has_graph)
        while trace is not None:
            name = trace.tb_frame.f_globals.get("__name__", "")
            if name.startswith("fsdp2.core."):
                return "it came while fsdp2 communicated, or made memory for that"
            trace = trace.tb_next
        if known is None:
            return "no pass has been complete before it, so nobody knows what other ranks wait for"
        if self._never is not None:
            return self._never
        if [moment for moment, _ in known[: len(self._moments)]] != self._moments:
            return _ANOTHER_ORDER
        if len({unit.schedule for unit in self._units}) > 1:
            return "modules of the model run by themselves, outside of the forward of one root"
        return None

    def serve(self) -> None:
        """Gather and reduce what the other ranks still gather and reduce in this pass. Collective: yes"""
        for unit, before in zip(self._units, self._micro_batches, strict=True):
            unit.set_micro_batch(replace(before, contributes=False))
        self._failed.clear()
        try:
            while self._open and self._open[-1][1] in self._optional:
                unit, module = self._open.pop()
                has_graph = unit.calls.running[-1] is not None
                self._serve(_Moment("end", self._places[unit], unit.modules.index(module), has_graph), False)
            schedule = self._units[0].schedule
            for moment, needs in self._known[self._has_graph][len(self._moments) :]:
                if moment.kind != "backward":
                    self._serve(moment, needs)
                elif schedule is not None:
                    self._serve_backward(schedule)
        finally:
            for unit, before in zip(self._units, self._micro_batches, strict=True):
                unit.set_micro_batch(before)

    def _serve(self, moment: _Moment, needs: bool) -> None:
        unit = self._units[moment.unit]
        module = unit.modules[moment.module]
        with torch.set_grad_enabled(moment.has_graph):
            tensor = torch.zeros(1, device=unit.device, requires_grad=needs)
            if moment.kind == "begin":
                unit.num_served += 1
                unit.hooks.pre_forward(module, (tensor,), {})
                self._note_log(unit)
            else:
                unit.hooks.post_forward(module, (), tensor * 1)

    def _serve_backward(self, schedule: Schedule) -> None:
        if schedule.backward is not None:  # the exception came inside
            schedule.end_of_backward()
        else:
            for log in self._logs:
                log.is_served = True
            *_, first = (moment for log in self._logs for moment in log.moments())
            with torch.enable_grad():
                loss = torch.zeros(1, device=first.unit.device, requires_grad=True) * 1
            assert loss.grad_fn is not None
            loss.grad_fn.register_prehook(lambda grads: schedule.begin_backward(first.call, first.unit))
            loss.backward(torch.ones_like(loss))  # type: ignore[no-untyped-call]
            for log in self._logs:  # the program may keep the graph
                log.is_served = False
        self._logs.clear()


_ANOTHER_ORDER = "passes do not run the same modules in the same order, so nobody knows what other ranks wait for"


def _is_gathered(unit: Unit) -> bool:
    return any(group.mesh.shard_size > 1 for group in unit.uses)
