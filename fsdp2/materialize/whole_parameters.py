"""Functions that initialize modules see whole parameters, and each rank keeps its slices.

Note: whole parameters on demand. A function may reach into other modules (``nn.MultiheadAttention`` fills its projection's bias, a
root's ``init_weights`` everything). While it runs, an operation on a sharded parameter is redirected to a whole one, which is gathered
if the parameter already has values. A whole one without references is cut again before the next one opens, so that memory stays
bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.group.own_memory import needs_own_memory
from ..core.group.param import ShardedParam, own_shard
from ..core.group.shown_parameters import set_parameter
from ..core.plan.model_axes import own_piece
from ..errors import MaterializationError
from ..torch_names import torch_dtensors, torch_tensors
from .meta_tensors import MetaTensors, Place, PlainTensor


@dataclass
class _Whole:
    """A managed parameter while it is whole.

    sharded: the parameter that the user sees between steps
    full:    its whole value, with the strides of the unsharded parameter; NaN (integers: 0) if it had no value
    keeps:   its values must stay: a function may read ``full``, or draw over it, without effect
    """

    param: ShardedParam
    sharded: nn.Parameter
    full: Tensor
    key: int
    keeps: bool
    is_shown: bool = False


class Initializing(torch_tensors.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One materialization. As a dispatch mode it redirects operations to whole parameters and notices what is written."""

    def __init__(self, found: MetaTensors, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._device = device
        self._open: dict[int, _Whole] = {}
        self._watched: dict[int, PlainTensor] = {}  # storage -> a plain tensor that nothing has written yet
        self._dirty: set[int] = set()  # storages of whole parameters that were written
        self._wrote: set[int] = set()  # managed parameters, by id, that were written
        for plain in found.plain.values():
            self._allocate(plain)

    def _allocate(self, plain: PlainTensor) -> None:
        meta = plain.tensor
        storage = _unset(torch.empty_strided(meta.shape, _dense_strides(meta), dtype=meta.dtype, device=self._device))
        new = torch.Tensor._make_subclass(type(meta), storage, meta.requires_grad)
        vars(new).update(vars(meta))
        plain.tensor, plain.meta = self._found.exchange(meta, new, plain.places)
        plain.written = storage.numel() == 0
        self._watched[_key(storage)] = plain

    # --- one module ---

    def visit(self, module: nn.Module, call: Callable[[nn.Module], object]) -> None:
        """Call ``call`` on ``module`` with its parameters whole, then keep what it wrote."""
        kept = self._copies_of_plain_values(module)
        shown: list[tuple[str, _Whole]] = []
        try:
            for name, param in list(module._parameters.items()):
                if param is not None and self._found.key(param) in self._found.managed:
                    whole = self._whole(param)
                    whole.is_shown = True
                    shown.append((name, whole))
                    set_parameter(module, name, whole.full)  # type: ignore[arg-type]
            with self:
                call(module)
            for name, whole in shown:
                self._adopt(module, name, whole)
        except BaseException:
            self._dirty.clear()  # a half-written parameter is not kept
            raise
        finally:
            for name, whole in shown:
                set_parameter(module, name, whole.sharded)
            for whole in list(self._open.values()):
                self._close(whole)
            for registry, name, tensor, copy in kept:
                registry[name] = tensor
                tensor.copy_(copy)

    def _copies_of_plain_values(self, module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
        """The plain parameters and buffers of ``module`` that have values already: they must stay."""
        found = self._found
        if not any(tensor is not None and found.is_missing(tensor) for tensor in _own(module)):
            return []
        return [
            (registry, name, tensor, tensor.clone())
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
            if tensor is not None and found.key(tensor) not in found.managed and not found.is_missing(tensor)
        ]

    def _adopt(self, module: nn.Module, name: str, whole: _Whole) -> None:
        """Adopt the present ``module.<name>``: a function may have put a new parameter, or new ``.data`` there, instead of writing."""
        now = module._parameters.get(name)
        if now is None or now.shape != whole.full.shape:
            raise MaterializationError(
                f"initialization replaced {name} of {type(module).__name__} by {None if now is None else tuple(now.shape)}",
                expected=f"a tensor of shape {tuple(whole.full.shape)}, as the parameter has it",
                fix="write into the parameter that is there",
            )
        if now is not whole.full or _key(now) != whole.key:
            self._dirty.discard(whole.key)
            whole.full, whole.key = now, _key(now)
            if not now.is_meta:
                self._dirty.add(whole.key)

    # --- whole parameters ---

    def _whole(self, sharded: Tensor) -> _Whole:
        key = self._found.key(sharded)
        whole = self._open.get(key)
        if whole is None:
            param = self._found.managed[key]
            full = self._empty(param)
            local = param.local_now()
            if not local.is_meta:  # written by an earlier call, or never on the meta device
                on_mesh = torch_dtensors.new_dtensor(local.to(self._device_of(param)), param.spec.sharded)
                full.copy_(on_mesh.full_tensor())
            whole = _Whole(param, param.sharded, full, _key(full), keeps=key not in self._found.sharded)
            if full.numel() == 0:
                self._dirty.add(whole.key)
            self._open[key] = whole
        return whole

    def _empty(self, param: ShardedParam) -> Tensor:
        meta = param.spec.sharded.tensor_meta
        assert meta is not None
        full = _unset(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self._device_of(param)))
        shown = nn.Parameter(full, requires_grad=param.sharded.requires_grad)
        vars(shown).update({name: value for name, value in vars(param.sharded).items() if not name.startswith("_is_param")})
        return shown

    def _device_of(self, param: ShardedParam) -> torch.device:
        mesh = param.spec.sharded.mesh
        return next((unit.device for unit in self._found.units if unit.device.type == mesh.device_type), self._device)

    def _close_unused(self) -> None:
        """Cut whole parameters that have no view left: a function that goes through a whole model needs one at a time."""
        for whole in list(self._open.values()):
            if not whole.is_shown and _storage_use_count(whole.full) == 1:
                self._close(whole)

    def _close(self, whole: _Whole) -> None:
        del self._open[self._found.key(whole.sharded)]
        if whole.key not in self._dirty or whole.keeps:
            self._dirty.discard(whole.key)
            return
        self._dirty.discard(whole.key)
        self._wrote.add(self._found.key(whole.sharded))
        self._store(whole.param, whole.full)

    def _store(self, param: ShardedParam, full: Tensor) -> None:
        """Keep this rank's slice of ``full``."""
        spec = param.spec
        whole = full.detach() if spec.unsharded is None else own_piece(full.detach(), spec.unsharded)
        piece = spec.to_logical(own_shard(whole, spec, param.rank))
        local = param.local_now()
        if not local.is_meta:
            local.copy_(piece)
            return
        if needs_own_memory(local):  # a tensor subclass, which must stay one
            values = torch.empty_like(local, device=piece.device)
            values.copy_(piece)
        else:
            values = piece.to(param.sharded.dtype, copy=True)
        new = nn.Parameter(torch_dtensors.new_dtensor(values, spec.sharded), requires_grad=param.sharded.requires_grad)
        for name, value in vars(param.sharded).items():
            setattr(new, name, value)
        param.sharded, _ = self._found.exchange(param.sharded, new, [Place(o.module._parameters, o.name) for o in param.owners])

    # --- as a dispatch mode ---

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            self._close_unused()
            args, kwargs = torch_tensors.pytree.tree_map_only(DTensor, self._redirect, (args, kwargs))
        result = func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable:
            for index, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[index] if index < len(args) else kwargs.get(argument.name)
                    for tensor in torch_tensors.pytree.tree_leaves(value):
                        if isinstance(tensor, Tensor):
                            self._note_write(_key(tensor))
        return result

    def _redirect(self, tensor: Any) -> Any:
        return self._whole(tensor).full if self._found.key(tensor) in self._found.managed else tensor

    def _note_write(self, key: int) -> None:
        plain = self._watched.get(key)
        if plain is not None:
            plain.written = True
        elif any(whole.key == key for whole in self._open.values()):
            self._dirty.add(key)

    # --- the end ---

    def finish(self, strict: bool) -> list[str]:
        """Names of the tensors that no function wrote; without ``strict``, these get storage and NaN as well."""
        for plain in self._found.plain.values():
            self._settle(plain)
        unwritten = [name for key, name in self._found.sharded.items() if key not in self._wrote]
        unwritten += [plain.fqn for plain in self._found.plain.values() if not plain.written]
        if not strict:
            for key in self._found.sharded:
                if key not in self._wrote:
                    param = self._found.managed[key]
                    self._store(param, self._empty(param))
            for plain in self._found.plain.values():
                plain.meta = None
        return unwritten

    def _settle(self, plain: PlainTensor) -> None:
        """A function may have replaced a buffer instead of writing it: move the new one to the same device."""
        for place in plain.places:
            now = place.registry.get(place.name)
            if now is plain.tensor:
                continue
            if now is not None and now.is_meta:
                place.registry[place.name] = plain.tensor  # the function made it on the meta device again: it has no value
                continue
            plain.written = True
            if now is not None and now.device.type != self._device.type:
                torch_tensors.set_data(now, now.data.to(self._device))

    def leave_unwritten_on_meta(self) -> None:
        """After an exception as well: a tensor without a value must not look as if it had one."""
        for plain in self._found.plain.values():
            if not plain.written and plain.meta is not None:
                self._found.exchange(plain.tensor, plain.meta, plain.places)
                plain.meta = None


def _own(module: nn.Module) -> Iterator[Tensor | None]:
    yield from module._parameters.values()
    yield from module._buffers.values()


def _key(tensor: Tensor) -> int:
    return torch_tensors.storage_key(tensor)


def _unset(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` with values that show that nothing wrote it."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that ``to_empty`` gives: the tensor's own if it is dense."""
    return torch.empty_like(tensor, device="meta").stride()


def _storage_use_count(tensor: Tensor) -> int:
    """How many tensors and others share the storage of ``tensor``; 1 if none does."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less ``storage`` itself
