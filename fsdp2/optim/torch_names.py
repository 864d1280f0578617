"""Private torch names that the optimizers use, and what differs between versions of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..torch_names.torch_tensors import FakeTensor, storage_key


def first_byte_of(tensors: Sequence[Tensor]) -> Callable[[Tensor], int]:
    """A function in C that gives the address of each of ``tensors``. Fake tensors get numbers, which differ by bytes in a storage."""

    def of_fake(tensor: Tensor) -> int:
        return (storage_key(tensor) << 64) + int(tensor.storage_offset()) * tensor.element_size()

    return of_fake if tensors and isinstance(tensors[0], FakeTensor) else Tensor.data_ptr


def have_equal_values(one: Tensor, other: Tensor) -> bool:
    """As ``torch.equal``; fake tensors, which have no values, are equal."""
    return isinstance(one, FakeTensor) or torch.equal(one, other)


def outside_of_modes() -> AbstractContextManager[Any]:
    """Inside, operators compute, also where a mode that is active makes tensors without memory."""
    return _disable_current_modes()


def unscale_and_check(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply by ``inv_scale`` in place; ``found_inf`` becomes 1.0 if a gradient is infinite or NaN. One device and dtype."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def step_unheard(optimizer: torch.optim.Optimizer) -> None:
    """A step that is a part of another optimizer's, or a trial: the hooks that are registered for all optimizers do not hear it.

    Hooks that the optimizer's class registers on itself do, and so does everybody then.
    """
    step = optimizer.step
    if getattr(step, "hooked", False) and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks:
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step()


def can_divide_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of all its groups is a fused kernel, which can divide gradients by a number as it reads them."""
    are_fused = all(group.get("fused") for group in optimizer.param_groups)
    return are_fused and getattr(optimizer, "_step_supports_amp_scaling", False)


def step_dividing_gradients(optimizer: torch.optim.Optimizer, divisor: Tensor) -> None:
    """A step by gradients / divisor, a () tensor in fp32. It is a field that ``GradScaler`` sets in the same way."""
    optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
    try:
        step_unheard(optimizer)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
