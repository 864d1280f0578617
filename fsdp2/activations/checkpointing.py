"""Which modules save their inputs alone in forward, and run again in backward. Mistakes are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ModuleError
from .around_forward import around_forward, put_around_forward
from .budget import Budget
from .checkpoint import Checkpoint
from .policy import checked_policy, chosen_modules, is_below, overloads


def apply_activation_checkpointing(model: nn.Module, policy: Any = "full") -> list[str]:
    """Let modules of ``model`` save their inputs alone, and compute what else their backward needs again, just before it.

    Before or after ``fully_shard`` and ``compile``, with the same result: a sharded module is gathered once for both its recomputation
    and its backward. Random numbers (dropout) are the same in both runs. Names in state dicts stay. Without autograd nothing changes.

    policy:     "full" (each of the repeated blocks), what ``wrap`` of ``parallelize`` takes, or an ``ActivationCheckpointPolicy``
    Returns:    the names of the modules that are checkpointed; with a budget, of the candidates
    Collective: no. All ranks must make the same choice.
    Raises:     ModuleError for modules that are checkpointed already, by whomever, or one inside of the other; ArgumentError for a
                policy that is none, or that matches nothing

    Example:
        fsdp2.apply_activation_checkpointing(model)
        model(x).sum().backward()  # each block runs again in backward
    """
    checked = checked_policy(policy)
    modules = chosen_modules("apply_activation_checkpointing", model, checked.modules)
    _refuse_twice(model, modules)
    budget = None if checked.max_nbytes is None else Budget(checked.max_nbytes)
    chosen = dict(list(modules.items())[:: checked.every])
    save_ops = tuple(overloads(checked.save_ops))
    for module in chosen.values():
        put_around_forward(module, inner=Checkpoint(save_ops))
        if budget is not None:
            put_around_forward(module, middle=budget)
    return list(chosen)


def _refuse_twice(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Raise ModuleError if a module would be computed more than twice."""
    by_others, by_us = [], []
    for name, module in sorted(model.named_modules(), key=lambda item: item[0]):
        if "_checkpoint_wrapped_module" in module._modules or getattr(module, "gradient_checkpointing", False) is True:
            by_others.append(name)
        if around_forward(module).inner is not None:
            by_us.append(name)
    twice = []
    for name in chosen:
        for taken, said in (
            (by_others, "{} is checkpointed by other means"),
            (by_us, "apply_activation_checkpointing has taken {} before"),
        ):
            near = [other for other in taken if name == other or is_below(name, other) or is_below(other, name)]
            twice += [f"{name}: {said.format(other or 'the model')}" for other in near]
        twice += [f"{name}: it is inside of {other}, which is to be checkpointed as well" for other in chosen if is_below(name, other)]
    if twice:
        raise ModuleError(
            f"apply_activation_checkpointing would have {len(twice)} modules checkpointed twice",
            items=twice,
            expected="each module below one checkpoint at most: two compute it three times",
            fix="choose other modules, or leave out the other checkpoint (checkpoint_wrapper, gradient_checkpointing_enable)",
        )
