"""The version of FSDP2 whose numbers fsdp2 gives where versions differ: ``fully_shard`` reads it, units keep it.

"2.13"  gradients are reduced in ``reduce_dtype``, else in the dtype that the forward computed with (torch 2.11 to 2.14)
"2.15"  ... else in ``param.grad_dtype`` if that was set, else in the parameter's own dtype: with bf16 compute and fp32
        parameters, gradients travel in fp32
"torch" as the torch that is installed; the default
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from ...errors import ArgumentError, got
from ...torch_names import torch_tensors
from ...user_warnings import log_once, was_told
from ..group.group_plan import GroupPlan

Semantics = Literal["2.13", "2.15"]

_chosen: Semantics | None = None


def set_semantics(semantics: Literal["torch", "2.13", "2.15"]) -> None:
    """Let later ``fully_shard`` calls give the numbers of that version of torch's FSDP2; sharded modules keep theirs.

    ``set_semantics("2.13")`` keeps bf16 gradients on the wire with torch 2.15: half of the bytes of the default there.
    Collective: no; all ranks must choose the same.

    Example:
        fsdp2.set_semantics("2.13")  # gradients travel in bf16
        fsdp2.fully_shard(net, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fsdp2.set_semantics("torch")
    """
    global _chosen
    known: dict[Any, Semantics | None] = {"torch": None, "2.13": "2.13", "2.15": "2.15"}
    if all(semantics != each for each in known):
        raise ArgumentError(
            got("set_semantics", "semantics", semantics),
            expected='"torch" (as the installed version), "2.13" or "2.15"',
            fix='for instance fsdp2.set_semantics("2.13")',
        )
    _chosen = known[semantics]


def chosen_semantics() -> Semantics:
    return _chosen or torch_tensors.INSTALLED_SEMANTICS


_NAME = "wide gradients"


def tell_of_wide_gradients(module: str, plans: Iterable[GroupPlan], has_reduce_dtype: bool) -> None:
    """Tell users who compute in bf16 over fp32 parameters: with torch 2.15 their gradients travel in fp32 by default.

    Logged once per process, on rank 0, at the first such ``fully_shard`` call; never if the user has chosen a dtype by
    ``reduce_dtype``, ``grad_dtype`` or ``set_semantics``.

    module: the class that was sharded; has_reduce_dtype: whether the policy has one
    Collective: no
    """
    if was_told(_NAME) or has_reduce_dtype or _chosen is not None:
        return
    wide = [
        plan for plan in plans if plan.reduce_dtype.itemsize > plan.param_dtype.itemsize and not plan.gradients.added_up
    ]
    if not wide:
        return
    first = wide[0]
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
