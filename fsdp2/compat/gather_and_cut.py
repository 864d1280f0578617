"""Gathering DTensors into whole tensors, and cutting whole tensors like a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..core.group.param import ShardedParam
from ..core.iteration.module_state import units_in
from ..core.modules.state_dicts import cut_whole
from ..core.plan.mesh import DataParallelMesh
from ..torch_names import torch_dtensors, torch_tensors


@torch.no_grad()
def whole(value: Tensor) -> Tensor:
    """``value`` gathered, on the device that collectives run on; shares no memory with it. Collective: yes, for DTensors."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.clone()
    local = torch_dtensors.local_tensor(value)
    kind = value.device_mesh.device_type
    if local.device.type != kind:  # offloaded: the mesh cannot gather from host memory
        value = torch_dtensors.new_dtensor(local.to(kind), torch_dtensors.spec_of(value))
    gathered = value.full_tensor()
    return gathered.clone() if torch_tensors.storage_key(gathered) == torch_tensors.storage_key(local) else gathered


def as_saved(value: DTensor, *, full: bool, to_cpu: bool, drop: bool) -> Tensor | None:
    """A DTensor as a state dict has it: whole or as it is, and on the device or in host memory.

    drop:       None instead of the whole tensor, on a rank that only takes part
    Collective: if ``full``, over its mesh
    """
    if full:
        gathered = whole(value)
        return None if drop else gathered.cpu() if to_cpu else gathered
    if not to_cpu:
        return value
    host = torch_dtensors.local_tensor(value).detach().to("cpu", copy=True)
    return torch_dtensors.new_dtensor(host, torch_dtensors.spec_of(value))


def sharded_params(module: nn.Module) -> dict[int, ShardedParam]:
    """How each sharded parameter is cut that the modules of ``module`` show, by its id."""
    found: dict[int, ShardedParam] = {}
    for unit in units_in(module.modules()):
        found.update({id(param.sharded): param for group in unit.uses for param in group.params})
    return found


@torch.no_grad()
def cut_like(value: Tensor, param: Tensor, cut: ShardedParam | None) -> Tensor:
    """``value``, whole and equal on all ranks, or a DTensor, as a DTensor that is placed like the DTensor ``param``.

    cut:        how ``param`` is cut, if fully_shard did it
    Collective: only for DTensors that are placed otherwise
    """
    assert isinstance(param, DTensor)
    if isinstance(value, DTensor):
        if value.device_mesh == param.device_mesh:
            return value if value.placements == param.placements else value.redistribute(placements=param.placements)
        value = whole(value)
    if cut is not None:
        return cut_whole(cut, value)
    return distribute_tensor(value.to(param.device_mesh.device_type), param.device_mesh, param.placements, src_data_rank=None)


def local_part(value: Any) -> Any:
    """This rank's part of a value of FSDP1's sharded state dicts (a ShardedTensor), else ``value`` itself."""
    shards = getattr(value, "local_shards", None)
    return value if shards is None else [shard.tensor for shard in shards()]


def is_first_rank(mesh: DataParallelMesh) -> bool:
    coordinate = mesh.mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)
