"""``FSDP.summon_full_params``: inside, modules show whole parameters in their own dtype; afterwards writes are kept, or not.

The whole parameters are new tensors, gathered one after another; the sharded ones, which the optimizer holds, are untouched until the
end. Forward runs with the shown parameters, without autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..core.group.param import ShardedParam, own_shard
from ..core.group.shown_parameters import set_parameter
from ..core.iteration.module_state import ModuleState, units_in
from ..core.plan.placement import in_dtype
from ..errors import ArgumentError, OrderError
from ..torch_names import torch_autograd, torch_dtensors, torch_tensors
from .gather_and_cut import is_first_rank, whole


@dataclass
class _Shown:
    """A parameter, and the whole one that modules show in its place; None on ranks that get no whole parameters."""

    param: ShardedParam
    instead: nn.Parameter | None


@contextmanager
def summoned(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """See ``FullyShardedDataParallel.summon_full_params``."""
    if writeback and rank0_only:
        raise ArgumentError(
            "summon_full_params got writeback=True and rank0_only=True",
            expected="at most one of them: the other ranks do not have values that one rank writes",
            fix="pass writeback=False, or rank0_only=False",
        )
    units = _units(module, recurse)
    _refuse_busy(units)
    for unit in units:
        unit.reshard_for_all()
        unit.summoned = True
    shown: list[_Shown] = []
    try:
        for unit in units:
            for group in unit.groups:
                keep = not rank0_only or is_first_rank(group.mesh)
                shown += [_show(param, keep, offload_to_cpu, with_grads) for param in group.params]
        yield
        if writeback:
            for each in shown:
                _write_back(each, with_grads)
    finally:
        for each in shown:
            for owner in each.param.owners:
                set_parameter(owner.module, owner.name, each.param.sharded)
        for unit in units:
            unit.summoned = False


def _units(module: nn.Module, recurse: bool) -> list[ModuleState]:
    return units_in(module.modules() if recurse else [module])


def _refuse_busy(units: list[ModuleState]) -> None:
    in_backward = torch_autograd.current_graph_task() != -1
    for unit in units:
        if unit.summoned or unit.calls.running or in_backward:
            where = "inside of summon_full_params" if unit.summoned else "inside of forward or backward"
            raise OrderError(
                f"summon_full_params was called {where}, of {unit.fqn or type(unit.modules[0]).__name__}",
                expected="a call between iterations, once for each module",
                fix="leave the other first; recurse=False leaves modules below alone",
            )


@torch.no_grad()
def _show(param: ShardedParam, keep: bool, to_cpu: bool, with_grads: bool) -> _Shown:
    """Collective: yes, over the mesh of ``param``."""
    full = _whole_over_data(param, param.sharded)
    grad = _whole_over_data(param, param.sharded.grad) if with_grads and param.sharded.grad is not None else None
    if not keep:
        return _Shown(param, None)
    instead = nn.Parameter(full.cpu() if to_cpu else full, requires_grad=param.sharded.requires_grad)
    for name, value in vars(param.sharded).items():
        if name not in vars(instead):
            setattr(instead, name, value)
    if grad is not None:
        if grad.dtype is not instead.dtype:
            torch_tensors.allow_any_grad_dtype(instead)
        instead.grad = grad.cpu() if to_cpu else grad
    for owner in param.owners:
        set_parameter(owner.module, owner.name, instead)
    return _Shown(param, instead)


def _whole_over_data(param: ShardedParam, value: Tensor) -> Tensor:
    """``value`` as in forward: whole, or with tensor parallelism the part of it that this rank computes with, a DTensor."""
    model = param.spec.unsharded
    if model is None:
        return whole(value)
    assert isinstance(value, DTensor)
    model_axes = {id(group) for group in model.mesh.get_all_groups()}
    kept = [
        placement if id(value.device_mesh.get_group(axis)) in model_axes and axis not in param.spec.data_axes else Replicate()
        for axis, placement in enumerate(value.placements)
    ]
    local = torch_dtensors.local_tensor(value.redistribute(placements=kept)).clone()
    if param.spec.annotations is not None:
        return local
    return torch_dtensors.new_dtensor(local, in_dtype(model, value.dtype))


@torch.no_grad()
def _write_back(shown: _Shown, with_grads: bool) -> None:
    param, instead = shown.param, shown.instead
    if instead is None:
        return
    param.local_now().copy_(_own(param, instead.detach()))
    grad = param.sharded.grad
    if with_grads and grad is not None and instead.grad is not None:
        torch_dtensors.local_tensor(grad).copy_(_own(param, instead.grad))  # type: ignore[arg-type]


def _own(param: ShardedParam, value: Tensor) -> Tensor:
    local = torch_dtensors.local_tensor(value) if isinstance(value, DTensor) else value
    return param.spec.to_logical(own_shard(local, param.spec, param.rank))
