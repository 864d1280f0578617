"""The names that programs get in runs on the reference, next to those of ``install(reference=True)``.

What is a DTensor in a sharded program is none here. But ``isinstance`` says that whole parameters and their gradients are DTensors;
``full_tensor`` returns the tensor itself, and ``to_local`` the piece that this rank would keep: programs compute norms of it, and scale
it. ``settle`` puts together what ranks have written into their pieces.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2

from .. import optim, reference
from ..doctor.replicas import digest
from ..installation import install


@contextlib.contextmanager
def on_the_reference(compute_dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, programs run on ``fsdp2.reference``. compute_dtype: None: as their policies have it"""
    names: list[tuple[Any, str, Any]] = [(fsdp2, "accumulate", _accumulate), (optim, "flat", _flat), (optim, "offloaded", _flat)]
    names += [(owner, "share_comm_ctx", lambda *_, **__: None) for owner in (fsdp2, torch.distributed.fsdp)]
    names += [(owner, "register_fsdp_forward_method", _register) for owner in (fsdp2, torch.distributed.fsdp)]
    names += [(reference, "compute_dtype", compute_dtype), (torch.distributed.tensor, "DTensor", _PieceOrDTensor)]
    names += [(reference.Unit, "__init__", _noted), (reference.Axes, "assemble", _assembled)]
    with contextlib.ExitStack() as undo, install(reference=True):
        for owner, name, stand_in in names:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)
        for name, function in (("full_tensor", lambda self, *_, **__: self), ("to_local", _to_local)):
            setattr(Tensor, name, function)
            undo.callback(delattr, Tensor, name)
        yield


# --- pieces -------------------------------------------------------------------------------------------------------------------------

_units: list[reference.Unit] = []
_given: list[tuple[Tensor, int, reference.Axes]] = []
"""Tensors that ``to_local`` has given a piece of, and how often they had been written then."""
_usual_init, _usual_assemble = reference.Unit.__init__, reference.Axes.assemble


def _noted(unit: reference.Unit, *args: Any) -> None:
    _usual_init(unit, *args)
    _units.append(unit)


def _assembled(axes: Any, whole: Tensor, dim: int) -> None:
    """Notes the values with which the program called ``fully_shard``, if there are any yet."""
    _usual_assemble(axes, whole, dim)
    axes.initial = None if whole.is_meta else digest(whole)


def _axes_of(tensor: Any) -> reference.Axes | None:
    """Of a whole parameter, or of its gradient, also detached."""
    if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.numel() and tensor.layout is torch.strided:
        for param, axes in ((param, axes) for unit in _units for param, axes in unit.params.items() if not isinstance(param, DTensor)):
            for each in (param, param.grad):
                if each is not None and each.shape == tensor.shape and each.data_ptr() == tensor.data_ptr():
                    return axes
    return None


def _to_local(self: Tensor, *_: Any, **__: Any) -> Tensor:
    axes = _axes_of(self)
    if axes is None or (self.requires_grad and torch.is_grad_enabled()):  # autograd would not average the gradient of a piece
        return self
    whole = self.data  # counts its own writes
    rank, size = 0, 1
    for group in axes.shard:
        rank, size = rank * group.size() + group.rank(), size * group.size()
    pieces = whole.chunk(size, axes.dim)
    _given.append((whole, whole._version, axes))
    return pieces[rank] if rank < len(pieces) else whole.narrow(axes.dim, 0, 0)


def settle() -> None:
    """Give all ranks what each has written into its piece. Collective: yes, where ranks have written"""
    given = list(_given)
    _given.clear()
    for whole, version, axes in given:
        if whole._version != version:
            axes.assemble(whole, axes.dim)


class _Kind(type(DTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, each: Any) -> bool:
        return isinstance(each, DTensor) or _axes_of(each) is not None


class _PieceOrDTensor(DTensor, metaclass=_Kind):
    """What programs import as ``DTensor``."""


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
