"""The names that programs get in runs on the reference, besides those of ``install(reference=True)``.

Whole tensors get ``full_tensor`` and ``to_local``, which are themselves: what is a DTensor in a sharded program is none here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2

from .. import optim, reference
from ..installation import install


@contextlib.contextmanager
def on_the_reference(compute_dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, programs run on ``fsdp2.reference``. compute_dtype: None: as their policies have it"""
    names: list[tuple[Any, str, Any]] = [(fsdp2, "accumulate", _accumulate), (optim, "flat", _flat), (optim, "offloaded", _flat)]
    names += [(owner, "share_comm_ctx", lambda *_, **__: None) for owner in (fsdp2, torch.distributed.fsdp)]
    names += [(owner, "register_fsdp_forward_method", _register) for owner in (fsdp2, torch.distributed.fsdp)]
    names += [(reference, "compute_dtype", compute_dtype)]
    with contextlib.ExitStack() as undo, install(reference=True):
        for owner, name, stand_in in names:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)
        for name in ("full_tensor", "to_local"):
            setattr(Tensor, name, lambda self, *_, **__: self)
            undo.callback(delattr, Tensor, name)
        yield


@contextlib.contextmanager
def _accumulate(model: Any, last: bool = False) -> Iterator[None]:
    model.set_requires_gradient_sync(last)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _flat(optimizer_class: Any, params: Any, policy: Any = None, *, fraction: float = 1.0, **options: Any) -> Any:
    """The optimizer itself, whose ``step`` clips where it is asked to."""

    class Plain(optimizer_class):  # type: ignore[misc]
        grad_norm: Tensor | None = None

        def step(self, closure: Any = None, *, max_norm: float | None = None, norm_type: float = 2.0) -> Any:
            if max_norm is not None:
                held = [param for group in self.param_groups for param in group["params"]]
                self.grad_norm = fsdp2.clip_grad_norm_(held, max_norm, norm_type)
            usual = optimizer_class.step
            return (usual.__wrapped__ if getattr(usual, "hooked", False) else usual)(self, closure)  # hooks hear this step once

    options.pop("step_in_backward", None)
    return Plain(params.parameters() if isinstance(params, nn.Module) else params, **options)


def _register(module: Any, name: str) -> None:
    """A method that is called in place of forward: its parameters and inputs are cast as in a forward."""
    usual, unit = getattr(module, name), module.reference

    @functools.wraps(usual)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit.before_forward(module, args, kwargs)
        return unit.after_forward(module, args, usual(*args, **kwargs))

    setattr(module, name, call)
