"""The dtypes in which a model is kept and computed, and whether the user has asked for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from ..optim.any_precision import AnyPrecisionAdamW
from .finding import Finding
from .inspected import Inspected

_LOW = (torch.bfloat16, torch.float16)


def dtype_findings(inspected: Inspected) -> Iterator[Finding]:
    yield from _pure_low_precision(inspected)
    yield from _casts(inspected)
    yield from _root_without_policy(inspected)


def _pure_low_precision(inspected: Inspected) -> Iterator[Finding]:
    """Trainable parameters that are kept in 16 bits, with an optimizer that adds its steps to them as they are."""
    compensated = {
        id(param)
        for optimizer in inspected.optimizers
        if _compensates(optimizer)
        for group in optimizer.param_groups
        for param in group["params"]
    }
    low = [
        param
        for param in inspected.params
        if param.dtype in _LOW and param.sharded.requires_grad and id(param.sharded) not in compensated
    ]
    if low:
        dtype = str(low[0].dtype).removeprefix("torch.")
        yield Finding(
            "pure-low-precision",
            "warning",
            f"{len(low)} trainable parameters are kept in {dtype}, without fp32 copies",
            f"{dtype} keeps {8 if low[0].dtype is torch.bfloat16 else 11} bits of a number: an update smaller than a few thousandths "
            "of a parameter is lost, and late training stands still without an error",
            "load or build the model in fp32 and pass MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), or "
            "train with fsdp2.optim.AnyPrecisionAdamW(use_kahan_summation=True)",
            tuple(param.fqn for param in low),
        )


def _compensates(optimizer: Optimizer) -> bool:
    """Whether it keeps what rounding takes from its updates."""
    kahan = all(group.get("use_kahan_summation") for group in optimizer.param_groups)
    return (isinstance(optimizer, AnyPrecisionAdamW) and kahan) or any(
        key in values for values in optimizer.state.values() for key in ("master_param", "master_weight", "compensation")
    )


def _casts(inspected: Inspected) -> Iterator[Finding]:
    """Findings where a policy's ``param_dtype`` widens narrow parameters, or narrows wide ones next to others."""
    widened: defaultdict[tuple[torch.dtype, torch.dtype], list[str]] = defaultdict(list)
    narrowed: defaultdict[tuple[torch.dtype, torch.dtype], list[str]] = defaultdict(list)
    for unit in inspected.units:
        # Frozen bases next to wider adapters are usual, so each kind is looked at by itself.
        kept: defaultdict[tuple[torch.dtype, bool], dict[torch.dtype, list[str]]] = defaultdict(dict)
        for group in unit.groups:
            if not group.dtype.is_floating_point or group.chosen_dtype is None:
                continue
            for param in group.params:
                kept[group.param_dtype, param.sharded.requires_grad].setdefault(group.dtype, []).append(param.fqn)
            if group.param_dtype.itemsize > group.dtype.itemsize:
                widened[group.dtype, group.param_dtype] += [param.fqn for param in group.params]
        for (param_dtype, _), found in kept.items():
            widest = max(found, key=lambda dtype: dtype.itemsize)
            if len(found) > 1 and widest.itemsize > param_dtype.itemsize:
                narrowed[widest, param_dtype] += found[widest]
    for (dtype, param_dtype), names in widened.items():
        yield Finding(
            "narrow-parameters-cast-up",
            "note",
            f"{len(names)} parameters are kept in {_short(dtype)} and gathered in {_short(param_dtype)}",
            "each all-gather moves more bytes than the parameters have, and no precision comes back",
            f"load the parameters in {_short(param_dtype)}, or leave param_dtype out",
            tuple(names),
        )
    for (dtype, param_dtype), names in narrowed.items():
        yield Finding(
            "wide-parameters-cast-down",
            "warning",
            f"{len(names)} parameters are kept in {_short(dtype)} next to narrower ones, and computed with in {_short(param_dtype)}",
            f"parameters that the program keeps in {_short(dtype)} on purpose (norms, routers) lose that precision in forward",
            "keep them by MixedPrecisionPolicy(param_dtype_override_fn=...), or give all parameters one dtype",
            tuple(names),
        )


def _root_without_policy(inspected: Inspected) -> Iterator[Finding]:
    """All modules below the root compute in one low dtype, and the root, with the same policy's parameters, does not."""
    root, *below = inspected.units
    dtypes = {group.chosen_dtype for unit in below for group in unit.groups}
    own = [group for group in root.groups if group.param_dtype.is_floating_point]
    if len(dtypes) != 1 or not own or root.mp_policy.param_dtype is not None or root.mp_policy.output_dtype is not None:
        return
    (dtype,) = dtypes
    if dtype is None or all(group.param_dtype is dtype for group in own):
        return
    yield Finding(
        "root-without-policy",
        "warning",
        f"the modules below the root compute in {_short(dtype)}, the root's own parameters in {_short(own[0].param_dtype)}",
        "fully_shard(model) takes no policy over from the modules below: what the root computes itself (head, last norm) meets inputs "
        "of another dtype, which fails or is promoted",
        f"pass the same mp_policy to fully_shard on the root; if it is to compute wider, say so: param_dtype={own[0].param_dtype}",
        tuple(param.fqn for group in own for param in group.params),
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
