"""Tell users who compute in bf16 over fp32 parameters: with torch 2.15 their gradients travel in fp32 by default.

Logged once per process, on rank 0, at the first such ``fully_shard`` call; never if the user has chosen a dtype by
``reduce_dtype``, ``grad_dtype`` or ``set_semantics``.
"""

from __future__ import annotations

from ..core.iteration.unit import Unit
from ..semantics import has_chosen_semantics
from ..user_warnings import log_once, was_told

_NAME = "wide gradients"


def tell_of_wide_gradients(unit: Unit) -> None:
    """``unit`` was sharded. Collective: no."""
    if was_told(_NAME) or unit.mp_policy.reduce_dtype is not None or has_chosen_semantics():
        return
    plans = [group.plan for group in unit.groups]
    wide = [plan for plan in plans if plan.reduce_dtype.itemsize > plan.param_dtype.itemsize and not plan.gradients.added_up]
    if not wide:
        return
    first, module = wide[0], type(unit.modules[0]).__name__
    narrow_kib = sum(plan.unsharded_nbytes for plan in wide) / 2**10
    wide_kib = sum(plan.layout.unsharded_numel * plan.reduce_dtype.itemsize for plan in wide) / 2**10
    log_once(
        _NAME,
        f"{module} is computed in {first.param_dtype}, and its gradients are reduced in {first.reduce_dtype}: "
        "from torch 2.15 on, FSDP2 without reduce_dtype reduces them in the dtype of the parameters. "
        f"This {module} reduces {wide_kib:.0f} KiB of gradients a step, where torch 2.14 reduced {narrow_kib:.0f}. "
        f"MixedPrecisionPolicy(param_dtype={first.param_dtype}, reduce_dtype={first.param_dtype}), or "
        'fsdp2.set_semantics("2.13") before fully_shard, keeps the old traffic; '
        f"reduce_dtype={first.reduce_dtype} keeps the new traffic. (Logged once.)",
    )
