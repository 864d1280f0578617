"""Parking: a sharded model gives its device memory to somebody else for a while, an inference engine for instance.

    fsdp2.park(model, optimizer)                  shards, gradients and optimizer state go to page-locked host memory
    fsdp2.park(model, optimizer, to="/scratch")   or to files there
    fsdp2.unpark(model, optimizer)                and come back, bit for bit

A flat shard is one copy, and so is a buffer of gradients, or a state of a flat optimizer. Parameters, gradients and states that are
DTensors stay the same objects, with local tensors on the host meanwhile. So a state dict can be read, or loaded, while they are parked.

Worked example: 1 GB of shards, 1 GB of gradients, 2 GB of Adam's state on a device: 4 GB are free while they are parked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .arguments import checked_path
from .core.group.all_gather import Gather
from .core.group.own_memory import needs_own_memory
from .core.group.param import ShardedParam, carry_grad_dtype
from .core.group.param_group import ParamGroup
from .core.iteration.module_state import named_units
from .errors import ArgumentError, ModuleError, OrderError, got, got_object
from .inspect import optimizers_that_stepped
from .mapped_file import mapped
from .optim import FlatOptimizer, OffloadedOptimizer
from .torch_names import torch_dtensors, torch_tensors

Optimizers = Optimizer | Sequence[Optimizer] | None

_HOME = "_fsdp2_home"
"""Attribute of a tensor that is parked: the device that it comes from, and whether its memory there was page-locked."""


def park(model: nn.Module, optimizer: Optimizers = None, *, to: str | os.PathLike[str] = "cpu") -> None:
    """Move shards, gradients and optimizer state off the device until ``unpark``; its memory is free then for any process.

    model:      a sharded module, or a module with some inside: only their parameters are parked. Plain parameters and buffers stay
    optimizer:  one, or several, whose state of these parameters is parked as well; None: it stays on the device
    to:         "cpu": page-locked host memory, where what is on the host already stays as it is; or a folder, for files without names
    Collective: no, but every rank must call it: a forward on one rank alone waits for the others
    Raises:     OrderError if a forward has a backward to come, gradients wait for more micro-batches, or unsharded memory must keep its
                address; ArgumentError for a folder that takes no files, or an optimizer that keeps its state on the host by itself.
                FSDPError if the folder has no room: then nothing is parked. While the model is parked, forward, steps and moves raise
                ParkedError

    Example:
        fsdp2.park(model, optimizer)
        fsdp2.unpark(model, optimizer)
    """
    groups, optimizers = _checked("park", model, optimizer)
    refuse_open("park", model)
    folder = None if to == "cpu" else _checked_folder(to)
    moving = [group for group in groups if not group.is_parked]
    for group in moving:
        _refuse_unfinished(group)
    params = {param.sharded for group in groups for param in group.params}
    states = _states(optimizers, params)
    parked_before = [tensor for tensor in _local_tensors(states) if _is_parked(tensor)]
    for group in moving:
        group.reshard_for_all()
    try:
        for group in moving:
            away = _Away(folder, f"shards and gradients of {group.fqn or 'the root'}")
            with _gradients_aside(group, away):
                _park(group, away if group.options.folder is None else _stays)
        _follow(optimizers, params)
        _move_states(states, _Away(folder, "optimizer state"))
    except BaseException:
        _unpark(moving, optimizers, params, parked_before)
        raise
    _give_back({group.device for group in groups})


def unpark(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Move what ``park`` has moved back to where it was. Where nothing is parked, this does nothing.

    model, optimizer: as in ``park``; a part of what was parked may come back alone
    Collective: no
    Raises:     torch.OutOfMemoryError if the device has no room: what is not back by then stays parked, and may be unparked later

    Example:
        fsdp2.unpark(model, optimizer)
    """
    groups, optimizers = _checked("unpark", model, optimizer)
    params = {param.sharded for group in groups for param in group.params}
    _unpark(groups, optimizers, params)


def _unpark(
    groups: Iterable[ParamGroup], optimizers: list[Optimizer], params: set[nn.Parameter], stay_parked: Iterable[Tensor] = ()
) -> None:
    states = _states(optimizers, params)
    back = _Back(stay_parked)
    devices = set()
    for group in (group for group in groups if group.is_parked):
        with _gradients_aside(group, back):
            _move_shards(group, back)
            group.is_parked = False
        devices.add(group.device)
    _follow(optimizers, params)
    _move_states(states, back)
    for device in devices:
        _synchronize(device)  # ``back`` keeps what is read until then


def _park(group: ParamGroup, moved: Callable[[Tensor], Tensor]) -> None:
    """Let the shards of ``group`` lie elsewhere; its parameters, whose gradients are away, keep their identity.

    moved: returns a flat shard's copy elsewhere, or its argument if it stays; or that of a parameter with memory of its own
    """
    group.reshard()
    group.gradients.forget_plan()
    if group.unsharded is not None and isinstance(group.unsharded.gather, Gather):
        group.unsharded.gather.forget()  # it refers to the flat shard, which is to be freed
    if group.mesh.shard_size == 1 or group.plan.has_own_memory:  # what is unsharded may share memory with the shards
        group.unsharded = None
        group.registry.forget()
        for param in group.params:
            param.unsharded = None
    group.is_parked = True  # even if the host's memory ends halfway: ``unpark`` brings back what has moved
    _move_shards(group, moved)


@torch.inference_mode(False)
@torch.no_grad()
def _move_shards(group: ParamGroup, moved: Callable[[Tensor], Tensor]) -> None:
    if group.flat is None:
        for param in group.params:
            param.move_to(moved(param.local))
    elif (flat := moved(group.flat)) is not group.flat:
        group.flat = flat
        for param, slot in zip(group.plan.params, group.plan.layout.slots, strict=True):
            param.enter_flat(flat, slot, has_values=True)
    for param in group.params:
        _follow_local(param)


def _follow_local(param: ShardedParam) -> None:
    """Let the sharded parameter, which has no gradient, be on the device of its local tensor; it stays the same object."""
    before = param.sharded
    if before.device == param.local.device:
        return
    after = nn.Parameter(torch_dtensors.new_dtensor(param.local, param.spec.sharded), requires_grad=before.requires_grad)
    vars(after).update(vars(before))
    carry_grad_dtype(before, after)
    torch_tensors.become(before, after)
    param.move_to(param.local)


# --- checks -------------------------------------------------------------------------------------------------------------------------


def _checked(caller: str, model: Any, optimizer: Any) -> tuple[list[ParamGroup], list[Optimizer]]:
    if not isinstance(model, nn.Module):
        raise ModuleError(got_object(caller, model), expected="an nn.Module", fix="pass the model itself")
    groups = [group for _, unit in named_units(model) for group in unit.groups]
    if not groups:
        raise ModuleError(
            f"{caller} got a {type(model).__name__} without parameters of fsdp2.fully_shard",
            expected="a sharded module, or a module with some inside",
            fix="call fsdp2.fully_shard, or fsdp2.parallelize, first",
        )
    listed = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not all(isinstance(each, Optimizer) for each in listed):
        raise ArgumentError(got(caller, "optimizer", optimizer), expected="an optimizer, or a list of some", fix="pass the optimizer")
    for each in listed:
        if isinstance(each, OffloadedOptimizer):
            raise ArgumentError(
                f"{caller} got an OffloadedOptimizer, which keeps its state on the host by itself",
                expected="an optimizer whose state lies where its parameters do",
                fix=f"call {caller}(model) without it",
            )
    return groups, listed


def _checked_folder(to: Any) -> str:
    folder = checked_path("park", "to", to)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ArgumentError(
            got("park", "to", to), expected='"cpu", or a folder that exists, and that this process may write to', fix='to="cpu"'
        )
    return str(folder)


def refuse_open(caller: str, model: nn.Module) -> None:
    """Raises: OrderError if a forward has a backward to come"""
    if any(unit.schedule is not None and unit.schedule.is_open for _, unit in named_units(model)):
        raise OrderError(
            f"{caller}: a forward of {type(model).__name__} has a backward to come",
            expected="a model between its steps",
            fix="run its backward first; or forward under torch.no_grad(); or call model.reset_iter_state()",
        )


def _refuse_unfinished(group: ParamGroup) -> None:
    if group.gradients.has_unreduced:
        raise OrderError(
            f"park: gradients of {group.params[0].fqn} and others wait for their last micro-batch",
            expected="gradients that have reached the sharded parameters",
            fix="run the last micro-batch's backward first, or call model.zero_grad()",
        )
    if group.keeps_storage:
        raise OrderError(
            f"park: the unsharded memory of {group.params[0].fqn} and others must keep its address",
            expected="unsharded memory that may be freed",
            fix="call model.set_keep_unsharded_storage(False), and drop the graphs that were captured",
        )


# --- tensors ------------------------------------------------------------------------------------------------------------------------


class _Away:
    """Copies a tensor to the host, or to a file. folder: None for memory; what: its content, for errors"""

    def __init__(self, folder: str | None, what: str) -> None:
        self._folder = folder
        self._what = what
        self._in_file: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def together(self, tensors: Iterable[Tensor]) -> None:
        """Copy those that go to a file into one: each file takes a descriptor, and a process has about 1000."""
        if self._folder is None:
            return
        found = [tensor for tensor in tensors if not self._stays(tensor) and not needs_own_memory(tensor)]
        if found:
            file, copies = mapped(self._folder, found, self._what)
            self._in_file.update({id(tensor): (tensor, copy.data) for tensor, copy in copies})  # no views of a larger tensor
            file.write_back()

    def _stays(self, tensor: Tensor) -> bool:
        if tensor.numel() == 0 or tensor.is_meta or _is_parked(tensor):
            return True
        return tensor.device.type == "cpu" and (self._folder is None or tensor.dim() == 0 or needs_own_memory(tensor))

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Tensor:
        if self._stays(tensor):
            return tensor
        if needs_own_memory(tensor):
            copy = tensor.cpu()  # in memory, not in a file
            vars(copy).update({key: value for key, value in vars(tensor).items() if key not in vars(copy)})
        elif self._folder is None:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
        else:
            if id(tensor) not in self._in_file:
                self.together([tensor])
            _, copy = self._in_file.pop(id(tensor))
        setattr(copy, _HOME, (tensor.device, tensor.device.type == "cpu" and tensor.is_pinned()))
        return copy


def _is_parked(tensor: Tensor) -> bool:
    return vars(tensor).get(_HOME) is not None


def _stays(tensor: Tensor) -> Tensor:
    return tensor


class _Back:
    """Copies a tensor that ``_Away`` has made to where it comes from; another one stays, and so do those of ``stay_parked``."""

    def __init__(self, stay_parked: Iterable[Tensor] = ()) -> None:
        self._read: list[Tensor] = []
        self._stay_parked = {id(tensor): tensor for tensor in stay_parked}

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Tensor:
        home = vars(tensor).get(_HOME)
        if home is None or id(tensor) in self._stay_parked:
            return tensor
        device, pinned = home
        if needs_own_memory(tensor):
            copy = tensor.to(device)
            vars(copy).update({key: value for key, value in vars(tensor).items() if key not in vars(copy)})
        else:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned)
            copy.copy_(tensor, non_blocking=True)
        self._read.append(tensor)
        setattr(copy, _HOME, None)
        return copy


@contextlib.contextmanager
@torch.no_grad()
def _gradients_aside(group: ParamGroup, moved: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards, the same ones, moved.

    Those of one reduction are views of one buffer, and stay so: clipping takes them together.
    """
    aside = [(param, param.sharded.grad) for param in group.params]
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    places: list[tuple[DTensor, Tensor]] = []
    for grad in (grad for _, grad in aside if isinstance(grad, DTensor)):
        local = torch_dtensors.waited_for(torch_dtensors.local_tensor(grad))
        buffer = local if local._base is None else local._base
        if id(buffer) not in buffers:
            copy = moved(buffer)
            if copy is not buffer:
                vars(copy).update({key: value for key, value in vars(buffer).items() if key != _HOME})
            buffers[id(buffer)] = buffer, copy
        copy = buffers[id(buffer)][1]
        at = local.storage_offset() - buffer.storage_offset()
        places.append((grad, copy if buffer is local else copy.as_strided(local.shape, local.stride(), at)))
    for param, _ in aside:
        param.sharded.grad = None
    try:
        yield
        for grad, local in places:
            _lie_at(grad, local)
    finally:
        for param, grad_before in aside:
            param.sharded.grad = grad_before


@torch.no_grad()
def _lie_at(tensor: DTensor, local: Tensor) -> None:
    """Let a DTensor that is no parameter have ``local``, on whichever device; it stays the same object."""
    if tensor.device != local.device:
        torch_tensors.become(tensor, torch_dtensors.new_dtensor(local, torch_dtensors.spec_of(tensor)))
    torch_dtensors.set_local_tensor(tensor, local)


# --- optimizers ---------------------------------------------------------------------------------------------------------------------


def _follow(optimizers: Iterable[Optimizer], params: set[nn.Parameter]) -> None:
    """Flat optimizers that were not passed have parts of the flat shards, too, and would keep these allocated."""
    for optimizer in dict.fromkeys([*optimizers, *optimizers_that_stepped()]):
        listed = [param for group in optimizer.param_groups for param in group["params"]]
        if isinstance(optimizer, FlatOptimizer) and not params.isdisjoint(listed):
            optimizer.follow_shards()


def _states(optimizers: Iterable[Optimizer], params: set[nn.Parameter]) -> list[dict[Any, Any]]:
    """What the optimizers keep for ``params``: dicts whose values may be replaced."""
    found = []
    for optimizer in optimizers:
        if isinstance(optimizer, FlatOptimizer):
            found += optimizer.states_of(params)
        else:
            found += [optimizer.state[param] for param in params if param in optimizer.state]
    return found


def _local_tensors(states: Iterable[dict[Any, Any]]) -> list[Tensor]:
    leaves = torch_tensors.pytree.tree_leaves([list(state.values()) for state in states])
    return [torch_dtensors.local_tensor(each) if isinstance(each, DTensor) else each for each in leaves if isinstance(each, Tensor)]


def _move_states(states: list[dict[Any, Any]], moved: _Away | _Back) -> None:
    if isinstance(moved, _Away):
        moved.together(_local_tensors(states))
    done: dict[int, tuple[Tensor, Tensor]] = {}  # one tensor may be the state of several parameters

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = tensor, _moved_state(tensor, moved)
        return done[id(tensor)][1]

    for state in states:
        for key, value in list(state.items()):
            state[key] = torch_tensors.pytree.tree_map_only(Tensor, move, value)


def _moved_state(tensor: Tensor, moved: Callable[[Tensor], Tensor]) -> Tensor:
    """The same tensor, with its values elsewhere, if it is a DTensor; else that of ``moved``."""
    if isinstance(tensor, DTensor):
        _lie_at(tensor, moved(torch_dtensors.local_tensor(tensor)))
        return tensor
    return moved(tensor)


# --- devices ------------------------------------------------------------------------------------------------------------------------


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _give_back(devices: Iterable[torch.device]) -> None:
    """Let other processes have what torch's allocators keep for later."""
    for device in devices:
        if device.type != "cpu":
            _synchronize(device)
            torch.get_device_module(device).empty_cache()
