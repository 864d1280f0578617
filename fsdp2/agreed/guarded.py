"""An optimizer step that all ranks take, or none.

A gradient that is not finite on one rank is in the shards of some ranks only, and an error may be one rank's alone. So before the step
ranks take the largest of a small number: 0 if a rank may step, 1 if its gradients are not finite, 2 if it reports a failure.

Worked example, 4 ranks: the loss of rank 2 was NaN, and the bad gradient lies in rank 0's shard

    numbers    1 0 0 0, the largest is 1
    all ranks  StepOutcome(taken=False, why=("rank 0: gradients that are not finite: blocks.0.up.weight",))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..arguments import OPTIMIZER, POSITIVE, Kind, require
from ..clip import clip_coefficient, complete_locals, scale, total_norm
from ..core.comm.agreement import agree, axes_of, largest_over
from ..core.group.param import as_sharded
from ..core.iteration.module_state import sharded_parameters
from ..errors import ArgumentError
from ..hangs.joint_calls import joint

_MAY_STEP, _NOT_FINITE, _FAILED = range(3)
_FAILURE = Kind(lambda value: isinstance(value, Exception), "an exception", "error")
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


@joint
def guarded_step(
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    failed: Exception | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> StepOutcome:
    """``optimizer.step()`` on all ranks, or on none: none steps if a gradient is not finite or a rank passes ``failed``.

    A step that is not taken leaves parameters, optimizer state and random states as they are, bit for bit. The gradients are the
    caller's: ``zero_grad`` drops them.

    max_norm:   clip to this 2-norm before the step, as ``clip_grad_norm_`` does; a norm that is not finite counts as such a gradient
    failed:     this rank's reason not to step, for instance an exception that the program has caught around its loss. The rank must
                have taken part in the collectives of forward and backward all the same.
    scaler:     unscale, step and update with it, instead of ``scaler.step`` and ``scaler.update``. Gradients that are not finite make
                the scale smaller, as usual; after ``failed`` the scaler is as before. It has no other optimizer.
    Collective: yes, over each mesh axis of the optimizer's parameters: one all-reduce of 8 bytes, which the host reads; with max_norm
                that of the norm; if the step is not taken, the reasons.
    Raises:     ArgumentError, for wrong arguments

    Example:
        model(x).sum().backward()
        outcome = fsdp2.guarded_step(optimizer, max_norm=1.0)
        outcome.taken
    """
    require("guarded_step", OPTIMIZER, optimizer=optimizer)
    require("guarded_step", POSITIVE.or_none, max_norm=max_norm)
    require("guarded_step", _FAILURE.or_none, failed=failed)
    require("guarded_step", _SCALER.or_none, scaler=scaler)
    params = as_sharded([param for group in optimizer.param_groups for param in group["params"]])
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
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return StepOutcome(True, norm)
    if scaler is not None:  # the scaler's own ranks have found the same infinities
        scaler.update(scaler.get_scale() if worst == _FAILED else None)
    reasons = {} if mine == _MAY_STEP else {torch.distributed.get_rank() if axes else 0: _reason(failed, params)}
    for group, _ in axes:
        reasons = {rank: why for each in agree(group, None, reasons) for rank, why in each.items()}
    return StepOutcome(False, norm, tuple(f"rank {rank}: {why}" for rank, why in sorted(reasons.items())))


def _is_finite(local: Tensor) -> bool:
    return local.numel() == 0 or bool(torch.linalg.vector_norm(local.detach(), torch.inf).isfinite())


def _reason(failed: Exception | None, params: Sequence[Tensor]) -> str:
    if failed is not None:
        return f"{type(failed).__name__}: {failed}"
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
