"""A ``grad_dtype`` that a user has set on a parameter also holds for a parameter that takes its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from .. import torch_compat as compat
from ..group.param import carry_grad_dtype
from ..iteration.unit import Unit


@contextlib.contextmanager
def kept_grad_dtypes(unit: Unit) -> Iterator[None]:
    """Around ``_apply``, until the unit has noticed it: gradients whose dtype the user has chosen follow to the new device only."""
    aside = []
    for group in unit.groups:
        if group.options.semantics == "2.13":
            continue
        for param in group.params:
            grad_dtype = compat.grad_dtype_of(param.sharded)
            if grad_dtype is not None:
                aside.append((param, grad_dtype, param.sharded.grad))
                param.sharded.grad = None
    try:
        yield
    finally:
        for param, grad_dtype, grad in aside:
            compat.set_grad_dtype(param.sharded, grad_dtype)
            if grad is not None:
                param.sharded.grad = grad.to(param.sharded.device)


class AfterLoading:
    """A hook behind ``load_state_dict``, which may have put other parameters into a module (``assign=True``)."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        for group in self._unit.uses:
            for param in group.params:
                for owner in param.owners:
                    now = module._parameters.get(owner.name) if owner.module is module else None
                    if now is not None and now is not param.sharded:
                        carry_grad_dtype(param.sharded, now)

    def __deepcopy__(self, memo: dict[Any, Any]) -> AfterLoading:
        return self  # a copied unit registers its own hook
