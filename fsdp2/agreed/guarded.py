"""An optimizer step that all ranks take, or none.

A gradient that is not finite on one rank is in the shards of some ranks only, and an error may be one rank's alone. So before the step
ranks take the largest of a small number: 0 if a rank may step, 1 if its gradients are not finite, 2 if it reports a failure.

Worked example, 4 ranks: the loss of rank 2 was NaN, and the bad gradient lies in rank 0's shard

    numbers    1 0 0 0, the largest is 1
    all ranks  StepOutcome(taken=False, why=("rank 0: gradients that are not finite: blocks.0.up.weight",))
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..arguments import OPTIMIZER, POSITIVE, Kind, require
from ..clip import clip_coefficient, complete_locals, scale, total_norm
from ..core.comm.agreement import axes_of, largest_over, told_over
from ..core.group.param import as_sharded
from ..core.iteration.module_state import ModuleState, sharded_parameters
from ..errors import ArgumentError, FSDPError, OrderError
from ..hangs.joint_calls import joint
from ..lost_ranks import is_of_memory
from ..optimizer_steps import STEPS, optimizers_that_stepped
from ..printable import in_bytes
from ..state_bytes import measured_state_bytes
from ..strategy import sharded_units
from .guarded_pass import GuardedPass
from .rounds import refuse_what_cannot_stand_in

_MAY_STEP, _NOT_FINITE, _FAILED = range(3)
_FAILURE = Kind(lambda value: isinstance(value, Exception), "an exception", "error")
_GUARD = Kind(lambda value: isinstance(value, Guard), "what fsdp2.guarded returns", "guard")
_SCALER = Kind(lambda value: isinstance(value, torch.amp.GradScaler), "a torch.amp.GradScaler", "fsdp2.optim.GradScaler()")


@dataclass(frozen=True)
class StepOutcome:
    """What ``guarded_step`` did, the same on all ranks.

    taken: the optimizer has stepped
    norm:  of all gradients before clipping; None without ``max_norm``
    why:   if not taken: for each rank that had a reason, the reason
    """

    taken: bool
    norm: Tensor | None = None
    why: tuple[str, ...] = ()


def guarded(model: nn.Module) -> Guard:
    """A guard for ``with guard:`` around each forward and backward of ``model``: an exception on some ranks does not stop the others.

    The rank on which it came goes on with the pass without computing, so that the others can complete theirs. Then all skip the
    step, by ``guarded_step(optimizer, guard=guard)``. Errors of fsdp2, and what is no ``Exception``, such as KeyboardInterrupt, leave
    the ``with`` as usual. If a rank cannot go on after an exception, the ``with`` raises OrderError. Let them end the program.

    Only fsdp2's collectives are served: a pass must have no others, such as those of tensor or expert parallelism, or an all-reduce
    of the number of tokens. Call these before or after the ``with``.

    model:      one that ``parallelize`` or ``fully_shard`` was called on
    Collective: no
    Raises:     ModuleError for a model that is not sharded; ArgumentError for what a rank cannot do without computing,
                SyncBatchNorm and tensor parallelism included; at ``with``, OrderError inside of another guard of the model

    Example:
        guard = fsdp2.guarded(model)
        with guard:
            model(x).sum().backward()
        fsdp2.guarded_step(optimizer, guard=guard).taken
    """
    units = sharded_units("guarded", model)
    refuse_what_cannot_stand_in("guarded", model, units)
    _refuse_other_collectives(model, units)
    return Guard(model, units)


def _refuse_other_collectives(model: nn.Module, units: Sequence[ModuleState]) -> None:
    found = [f"{name}: a SyncBatchNorm" for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    for unit in units:
        for group in unit.groups:
            meshes = [param.sharded.device_mesh for param in group.params if isinstance(param.sharded, DTensor)]
            if any(mesh.size() > group.mesh.size for mesh in meshes):
                found.append(f"{unit.fqn or 'the root'}: parameters on axes of tensor parallelism")
    if found:
        raise ArgumentError(
            "guarded got a model whose forward may communicate by itself",
            items=found,
            expected="a model in which only fsdp2 communicates: after an exception, a rank takes part in nothing else",
            fix="train this model without a guard, or without these modules",
        )


class Guard:
    """What ``guarded`` returns.

    failed: the first exception in the passes of this step, until a pass of the next one; None if there was none on this rank
    """

    failed: Exception | None = None

    def __init__(self, model: nn.Module, units: Sequence[ModuleState]) -> None:
        self._model = model
        self._units = units
        self._pass = GuardedPass(units)
        self._before: Callable[[], None] | None = None  # from the first pass of a step to its end
        self._asks = False  # a pass has made gradients, which other ranks may lack
        self._answered: set[int] = set()  # the parameters whose step was not taken
        _guards.add(self)
        STEPS.asked.add(_refuse_without_guard)

    def __enter__(self) -> Guard:
        before = self._before or _restoring(self._model, self._units[0].device.type)
        self._pass.begin()
        if self._before is None:
            self.failed = None
        self._before = before
        if torch.is_grad_enabled():
            self._asks, self._answered = True, set()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        guarded = self._pass
        guarded.stop()
        try:
            if error is None:
                guarded.complete()
                return False
            if isinstance(error, FSDPError) or not isinstance(error, Exception):
                guarded.give_up()
                return False
            place = guarded.place
            note = f"fsdp2: in {place}{_memory(self._model, self._units) if is_of_memory(error) else ''}"
            vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), note]  # as ``add_note``, which Python 3.10 lacks
            problem = guarded.why_not_served(error)
            if problem is not None:
                guarded.give_up()
                raise _cannot_go_on(place, error, problem) from error
            if self.failed is None:
                self.failed = error
            traceback.clear_frames(trace)  # they hold activations
            try:
                guarded.serve()
            except FSDPError:
                raise
            except Exception as another:
                raise _cannot_go_on(place, error, f"{type(another).__name__}: {another}") from error
            return True
        finally:
            guarded.forget()

    def _end_step(self, optimizer: Optimizer, worst: int) -> None:
        if self._before is not None and worst != _MAY_STEP:
            self._before()
        self._before = None
        self._asks &= worst == _FAILED  # another optimizer of these passes must not step either
        self._answered |= _ids(optimizer)


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _refuse_without_guard(optimizer: Optimizer) -> None:
    """A rank alone knows of its failure, but all ranks know of the guard."""
    for each in _guards:
        if not each._asks:
            continue
        params = (param.sharded for unit in each._units for group in unit.groups for param in group.params)
        waiting = _ids(optimizer) - each._answered
        if any(id(param) in waiting for param in params):
            raise ArgumentError(
                f"{type(optimizer).__name__} steps without the guard that passes of this step ran in",
                expected="the guard, which knows whether a pass has failed",
                fix="fsdp2.guarded_step(optimizer, guard=guard) instead of optimizer.step()",
            )


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(param) for param in _params_of(optimizer)}


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return as_sharded([param for group in optimizer.param_groups for param in group["params"]])


def _restoring(model: nn.Module, device_type: str) -> Callable[[], None]:
    """A function that puts random states of torch, and the model's buffers, back to what they are now."""
    generators = [torch.random, *([] if device_type == "cpu" else [torch.get_device_module(device_type)])]
    states = [each.get_rng_state() for each in generators]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_rng_state(state)
        for buffer, value in buffers:
            buffer.copy_(value)

    return restore


def _memory(model: nn.Module, units: Sequence[ModuleState]) -> str:
    """What this rank keeps at this moment, by the plan of the units and by its storages."""
    states = [measured_state_bytes(model, each) for each in optimizers_that_stepped()]
    gradients = measured_state_bytes(model).gradients
    groups = [group for unit in units for group in unit.groups]
    kept = sum(complete_locals([param.sharded])[0].nbytes for group in groups for param in group.params)
    unsharded = [group.plan.unsharded_nbytes for group in groups if group.is_unsharded]
    largest = max(units, key=lambda unit: unit.unsharded_nbytes)
    return (
        f"; its shards of parameters take {in_bytes(kept)}, gradients {in_bytes(gradients)}, states of optimizers "
        f"{in_bytes(sum(each.optimizer for each in states))}, the {len(unsharded)} of {len(groups)} groups that are unsharded take "
        f"{in_bytes(sum(unsharded))}; the largest unit unsharded, {largest.fqn or 'the root'}, {in_bytes(largest.unsharded_nbytes)}; "
        "the rest is the program's, activations above all (docs/memory.md)"
    )


def _cannot_go_on(place: str, error: Exception, problem: str) -> OrderError:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return OrderError(
        f"rank {rank} has failed in {place}, and cannot go on with this pass for the other ranks: {problem}",
        items=[_in_words(error)],
        expected="an exception of the program in a pass like those before it",
        fix="let this error end the program, which tells it to the other ranks; fix its cause, or start again from a checkpoint",
    )


@joint
def guarded_step(
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    failed: Exception | None = None,
    scaler: torch.amp.GradScaler | None = None,
    guard: Guard | None = None,
) -> StepOutcome:
    """``optimizer.step()`` on all ranks, or on none: none steps if a gradient is not finite or a rank passes ``failed``.

    A step that is not taken leaves parameters, optimizer state and random states as they are, bit for bit. The gradients are the
    caller's: ``zero_grad`` drops them.

    max_norm:   clip to this 2-norm before the step, as ``clip_grad_norm_`` does; a norm that is not finite counts as such a gradient
    failed:     this rank's reason not to step, for instance an exception that the program has caught around its loss. The rank must
                have taken part in the collectives of forward and backward all the same.
    guard:      of the passes of this step: an exception in them counts as ``failed``, and a step that is not taken also puts torch's
                random states and the model's buffers back to those before these passes
    scaler:     unscale, step and update with it, instead of ``scaler.step`` and ``scaler.update``. Gradients that are not finite make
                the scale smaller, as usual; after ``failed`` the scaler is as before. It has no other optimizer.
    Collective: yes, over each mesh axis of the optimizer's parameters: one all-reduce of 8 bytes, which the host reads; with max_norm
                that of the norm; if the step is not taken, the reasons.
    Raises:     ArgumentError, for wrong arguments, and without the guard that passes of this step ran in

    Example:
        model(x).sum().backward()
        outcome = fsdp2.guarded_step(optimizer, max_norm=1.0)
        outcome.taken
    """
    require("guarded_step", OPTIMIZER, optimizer=optimizer)
    require("guarded_step", POSITIVE.or_none, max_norm=max_norm)
    require("guarded_step", _FAILURE.or_none, failed=failed)
    require("guarded_step", _SCALER.or_none, scaler=scaler)
    require("guarded_step", _GUARD.or_none, guard=guard)
    if guard is None:
        _refuse_without_guard(optimizer)
    elif failed is None:
        failed = guard.failed
    params = _params_of(optimizer)
    meshes = list(dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)))
    if not meshes:
        raise ArgumentError(
            "guarded_step got an optimizer without a sharded parameter",
            expected="parameters of a model that fully_shard or parallelize was called on",
            fix="make the optimizer after fully_shard",
        )
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm: Tensor | None = None
    parts: list[Tensor] = []
    if max_norm is None:
        is_finite = all(map(_is_finite, complete_locals([param.grad for param in params if param.grad is not None])))
    else:
        with torch.no_grad():
            norm, parts = total_norm([param.grad for param in params], params, 2.0)
        is_finite = bool(norm.isfinite())
    mine = _FAILED if failed is not None else _MAY_STEP if is_finite else _NOT_FINITE
    axes = axes_of(meshes)
    [worst] = largest_over(axes, mine)
    if worst == _MAY_STEP:
        if max_norm is not None and norm is not None:
            with torch.no_grad():
                scale(parts, clip_coefficient(norm, max_norm), None)
        if guard is not None:
            guard._end_step(optimizer, worst)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return StepOutcome(True, norm)
    if scaler is not None:  # the scaler's own ranks have found the same infinities
        scaler.update(scaler.get_scale() if worst == _FAILED else None)
    reasons = told_over([group for group, _ in axes], None if mine == _MAY_STEP else _reason(failed, params))
    if guard is not None:
        guard._end_step(optimizer, worst)
    return StepOutcome(False, norm, tuple(f"rank {rank}: {why}" for rank, why in sorted(reasons.items()) if why))


def _in_words(error: Exception) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _is_finite(local: Tensor) -> bool:
    return local.numel() == 0 or bool(torch.linalg.vector_norm(local.detach(), torch.inf).isfinite())


def _reason(failed: Exception | None, params: Sequence[Tensor]) -> str:
    if failed is not None:
        return _in_words(failed)
    known = sharded_parameters()
    bad = [
        known[id(param)][0].fqn if id(param) in known else f"a parameter {tuple(param.shape)}"
        for param in params
        if param.grad is not None and not _is_finite(*complete_locals([param.grad]))
    ]
    if not bad:
        return "a norm of the gradients that is not finite"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"gradients that are not finite: {', '.join(bad[:3])}{more}"
