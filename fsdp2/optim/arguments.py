"""Checks of what an optimizer is made of: its class, its parameters, its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, got, short


def checked_class(caller: str, optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ArgumentError(
            got(caller, "optimizer_class", optimizer_class),
            expected="a class of optimizers, not its name or an optimizer",
            fix=f"{caller}(torch.optim.AdamW, model, lr=1e-3)",
        )


def listed_params(caller: str, params: Any) -> list[Any]:
    """What an optimizer takes, as a list: of a model, its parameters; else tensors, pairs of a name and a tensor, or groups."""
    if isinstance(params, nn.Module):
        listed = list(params.parameters())
    else:
        listed = [] if isinstance(params, (str, Tensor)) or not isinstance(params, Iterable) else list(params)
    if not listed or not all(_is_entry(each) for each in listed):
        raise ArgumentError(
            got(caller, "params", next((each for each in listed if not _is_entry(each)), params)),
            expected="a model, or one or more parameters, pairs of a name and a parameter, or dicts with them as 'params'",
            fix="pass the model itself",
        )
    return listed


def _is_entry(each: Any) -> bool:
    if isinstance(each, dict):
        return "params" in each
    return isinstance(each, Tensor) or (isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Tensor))


def holds(test: Callable[[Any], bool], value: Any) -> bool:
    """False also for a value of a kind that ``test`` cannot take."""
    try:
        return test(value)
    except (TypeError, ValueError):
        return False


def result_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a ``step`` returns, called with autograd; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def made(make: Callable[[], Optimizer], name: str, options: Mapping[str, Any]) -> Optimizer:
    """What ``make`` returns. Raises: ArgumentError with the options, if it refuses them."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} refuses these options: {error}",
            items=[f"{key}={short(value)}" for key, value in options.items()],
            expected=f"options that {name}(params, ...) takes",
            fix=f"pass those that help({name}) lists",
        ) from error
