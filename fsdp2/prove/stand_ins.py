"""The names that programs get in runs on the reference, next to those of ``install(reference=True)``.

What is a DTensor in a sharded program is none here. But ``isinstance`` says that whole parameters and their gradients are DTensors;
``full_tensor`` returns the tensor itself, and ``to_local`` the piece that this rank would keep: programs compute norms of it, and scale
it. ``settle`` puts together what ranks have written into their pieces.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import fsdp2

from .. import optim, reference
from ..agreed.guarded import StepOutcome
from ..doctor.replicas import digest
from ..errors import OrderError
from ..inspect import exchange
from ..installation import install


@contextlib.contextmanager
def on_the_reference(compute_dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, programs run on ``fsdp2.reference``. compute_dtype: None: as their policies have it"""
    own: dict[str, Any] = {
        "accumulate": _accumulate,
        "uneven": _uneven,
        "guarded": _Guard,
        "guarded_step": _guarded_step,
        "park": _nothing,
        "unpark": _nothing,
    }
    shared: dict[str, Any] = {"share_comm_ctx": _nothing, "register_fsdp_forward_method": _register}
    names: list[tuple[Any, dict[str, Any]]] = [(fsdp2, own | shared), (torch.distributed.fsdp, shared)]
    names += [(optim, {"flat": _flat, "offloaded": _flat}), (torch.distributed.tensor, {"DTensor": _PieceOrDTensor})]
    replacements = {}
    for home, name, means in ((home, name, means) for home, found in names for name, means in found.items()):
        was = getattr(home, name)
        setattr(home, name, was)  # fsdp2 looks some up when they are asked for
        replacements[id(was)] = was, means
    patches = [
        (reference, "compute_dtype", compute_dtype),
        (reference.Unit, "__init__", _noted),
        (reference.Axes, "assemble", _assembled),
    ]
    with contextlib.ExitStack() as undo, install(reference=True) as installation:
        installation.rebind(replacements, (home for home, _ in names))
        for owner, name, stand_in in patches:
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
        asks = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        is_asked_by_library = asks in ("torch", "fsdp2")  # which treat them as they are
        return isinstance(each, DTensor) or (not is_asked_by_library and _axes_of(each) is not None)


class _PieceOrDTensor(DTensor, metaclass=_Kind):
    """What programs import as ``DTensor``."""


# --- steps --------------------------------------------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def _with_all(model: nn.Module, **values: bool) -> Iterator[None]:
    """Set attributes of all units, which are True again afterwards."""
    units = [each.reference for each in model.modules() if isinstance(each, reference.ReferenceModule)]
    for unit in units:
        vars(unit).update(values)
    try:
        yield
    finally:
        for unit in units:
            vars(unit).update(dict.fromkeys(values, True))


def _accumulate(model: nn.Module, last: bool = False) -> contextlib.AbstractContextManager[None]:
    return _with_all(model, is_synchronized=last)


@contextlib.contextmanager
def _uneven(model: nn.Module) -> Iterator[Any]:
    yield _Work(model)
    if any(each is not None for each in exchange(None)):
        raise OrderError("a rank has left its loop before the others", expected="work.stop()", fix="call it in place of break")


class _Work:
    """Ranks tell each other what they have for a step, and all run as often as the rank with the most: stand-ins do not contribute."""

    stands_in, is_last, scale = False, True, 1.0

    def __init__(self, model: nn.Module) -> None:
        self._model, self._stops, self._buffers = model, False, list[tuple[Tensor, Tensor]]()

    def __call__(self, loader: Any, *, count: Any = None, micro_batches: int = 1) -> Iterator[Any]:
        source, kept, self._stops = iter(loader), list[Any](), False
        while True:
            own = [] if self._stops else list(itertools.islice(source, micro_batches))
            counted = math.fsum(1.0 if count is None else float(count(each)) for each in own)
            rows = exchange((len(own), counted, self._stops, own[:1]))
            if None in rows:
                raise OrderError("a rank has left its loop before the others", expected="work.stop()", fix="call it in place of break")
            num_rounds = max(number for number, *_ in rows)
            if not num_rounds or any(stops for *_, stops, _ in rows):
                return
            total = math.fsum(each for _, each, *_ in rows)
            self.scale = len(rows) / total if total else 0.0
            kept = kept or next(first for *_, first in rows if first)
            for number in range(num_rounds):
                self.stands_in, self.is_last = number >= len(own), number == num_rounds - 1
                kept = kept if self.stands_in else [own[number]]
                self._buffers = [(each, each.detach().clone()) for each in self._model.buffers()] if self.stands_in else []
                with _with_all(self._model, is_synchronized=self.is_last, contributes=not self.stands_in):
                    yield tree_map(lambda leaf: leaf, kept[0])  # programs change containers
                self._restore()

    def backward(self, loss: Tensor) -> None:
        (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        self._restore()

    def stop(self) -> None:
        self._stops = True

    @torch.no_grad()
    def _restore(self) -> None:
        for buffer, value in self._buffers:
            buffer.copy_(value)


class _Guard(contextlib.nullcontext[Any]):
    """It catches nothing."""

    failed = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self)


def _guarded_step(
    optimizer: Any, *, max_norm: float | None = None, failed: Exception | None = None, scaler: Any = None, guard: Any = None
) -> StepOutcome:
    """Ranks agree on the largest of 0 (may step), 1 (gradients that are not finite) and 2 (failed)."""
    if scaler is not None:
        scaler.unscale_(optimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    norm = fsdp2.get_total_norm([param.grad for param in held if param.grad is not None])
    mine = 2 if failed is not None else int(not norm.isfinite())
    numbers = exchange(mine)
    told = norm if max_norm is not None else None
    if worst := max(numbers):
        if scaler is not None:
            scaler.update(scaler.get_scale() if worst == 2 else None)
        return StepOutcome(False, told, tuple(f"rank {rank}: {each}" for rank, each in enumerate(numbers) if each))
    if max_norm is not None:
        fsdp2.clip_grad_norm_(held, max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return StepOutcome(True, told)


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
