"""The user's choices for activations: which modules compute theirs again in backward, and what those save all the same.

"full"                                                 each of the repeated blocks
by_class(Block), [Block], by_name(r"layers\\.\\d+")      as the ``wrap`` argument of ``parallelize``
ActivationCheckpointPolicy(every=2)                    every second block
ActivationCheckpointPolicy(save_ops=HEAVY_OPS)         each block, but the results of these operators are saved
ActivationCheckpointPolicy(max_nbytes=8 << 30)         as many blocks as it takes to save no more than that
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..arguments import COUNT, NATURAL, require
from ..errors import ArgumentError, ModuleError, got_object
from ..grouping.module_tree import ModuleTree
from ..grouping.planning import with_forward
from ..grouping.policies import as_policy

_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)

HEAVY_OPS: tuple[torch._ops.OpOverload, ...] = tuple(
    getattr(torch.ops.aten, name).default for name in _OPERATORS if hasattr(torch.ops.aten, name)
)
"""Matrix products, convolutions and attention: most of a block's time, for a part of its bytes."""


@dataclass(frozen=True)
class ActivationCheckpointPolicy:
    """Which modules save their inputs alone, and compute the rest again in backward.

    modules:    the candidates, as ``wrap`` of ``parallelize``: "auto" (the repeated blocks), classes, or a policy of ``fsdp2.wrap``
    every:      of those, in the model's order, the first of each ``every``
    save_ops:   operators whose results are saved all the same, and not computed again
    max_nbytes: bytes that the candidates of one rank may save in a forward. As many as fit save everything, the last first, for
                backward frees these before it computes others again. All are checkpointed in the first step, in which they are
                measured, and whenever an input is larger than those that were.

    Example:
        policy = fsdp2.activations.ActivationCheckpointPolicy(every=2)
        fsdp2.apply_activation_checkpointing(model, policy)  # the first of each two blocks
    """

    modules: Any = "auto"
    every: int = 1
    save_ops: Collection[Any] = ()
    max_nbytes: int | None = None


def checked_policy(policy: Any) -> ActivationCheckpointPolicy:
    """The policy that ``policy``, or its shorthand, means. Raises: ArgumentError."""
    if isinstance(policy, str) and policy == "full":
        return ActivationCheckpointPolicy()
    if not isinstance(policy, ActivationCheckpointPolicy):
        return ActivationCheckpointPolicy(as_policy(policy))
    as_policy(policy.modules)
    require("ActivationCheckpointPolicy", COUNT, every=policy.every)
    if policy.max_nbytes is not None:
        require("ActivationCheckpointPolicy", NATURAL, max_nbytes=policy.max_nbytes)
        if policy.every != 1 or policy.save_ops:
            raise ArgumentError(
                "ActivationCheckpointPolicy got max_nbytes together with every or save_ops",
                expected="one of them: with a budget, bytes alone decide which modules are checkpointed",
                fix="leave out max_nbytes, or the others",
            )
    strange = [repr(each) for each in policy.save_ops if not isinstance(each, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))]
    if strange:
        raise ArgumentError(
            f"ActivationCheckpointPolicy got {len(strange)} save_ops that are no operators",
            items=strange,
            expected="operators as torch.ops has them",
            fix="for instance save_ops=[torch.ops.aten.mm.default], or fsdp2.activations.HEAVY_OPS",
        )
    return policy


def overloads(save_ops: Collection[Any]) -> list[Any]:
    """Each operator, and of a packet each of its overloads."""
    found = []
    for each in save_ops:
        if isinstance(each, torch._ops.OpOverloadPacket):
            found += [getattr(each, name) for name in each.overloads()]  # type: ignore[no-untyped-call]
        else:
            found.append(each)
    return found


def chosen_modules(caller: str, model: nn.Module, modules: Any) -> dict[str, nn.Module]:
    """The modules that ``modules`` means in ``model``, sharded or not, by name and in the model's order.

    Of the blocks that "auto" finds, not the embedding and the head next to them: these save next to nothing but their inputs.
    Raises: ModuleError if ``model`` is no module, ArgumentError if ``modules`` means none
    """
    if not isinstance(model, nn.Module):
        raise ModuleError(got_object(caller, model), expected="an nn.Module", fix="pass the model itself")
    tree = ModuleTree(model, through_sharded=True)
    found = [each for group in as_policy(modules).choose(tree) for module in group for each in with_forward(tree, module)]
    if modules == "auto" and any(_has_parts(module) for module in found):
        found = list(filter(_has_parts, found))
    if not found:
        raise ArgumentError(
            f"{caller} found no repeated blocks in {type(model).__name__}",
            expected="a list of modules that are built the same way, or modules that are named",
            fix=f"for instance {caller}(model, fsdp2.wrap.by_class(Block))",
        )
    names = {tree.name_of(module): module for module in found}
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(names.items(), key=lambda item: order[item[0]]))


def is_below(name: str, other: str) -> bool:
    """Whether the module called ``name`` is inside of the one called ``other``, and another one."""
    return name != other and (other == "" or name.startswith(f"{other}."))


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
