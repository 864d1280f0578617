"""torch's private modules and classes around FSDP2, as far as other projects use them. The only file here that names them."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

from ..core.plan.mesh import DataParallelMesh
from ..torch_names import torch_name

__all__ = [
    "FSDP1_HOMES",
    "FSDP2_HOMES",
    "count_as",
    "homes",
    "idle",
    "is_needed_by_torch",
    "mesh_info",
    "state_module",
    "tracker_behind",
]

common = torch_name("torch.distributed.fsdp._fully_shard._fsdp_common")
state_module = torch_name("torch.distributed.fsdp._fully_shard._fsdp_state")

FSDP2_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""The modules from which programs import FSDP2's names."""

FSDP1_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.fsdp.wrap",
)
"""The modules from which programs import FSDP1's names."""


def homes(names: tuple[str, ...]) -> list[types.ModuleType]:
    """These modules of torch, imported."""
    for reader in ("torch.distributed._composable.replicate_with_fsdp", "torch.distributed.pipelining.stage"):
        importlib.import_module(reader)  # from now on it has torch's names, even if the homes have ours
    return [importlib.import_module(name) for name in names]


def is_needed_by_torch(module: types.ModuleType, name: str) -> bool:
    """Whether torch's methods look ``name`` up in ``module``: on modules that torch has sharded they must find torch's class there."""
    return module.__name__ == "torch.distributed.fsdp._fully_shard._fully_shard" and name == "FSDPModule"


def idle() -> Any:
    """torch's ``TrainingState`` of a parameter group between forwards and backwards."""
    return common.TrainingState.IDLE


def mesh_info(mesh: DataParallelMesh) -> Any:
    """torch's description of a data-parallel mesh."""
    if mesh.shard_axis is None:
        return common.DDPMeshInfo(mesh.mesh, replicate_mesh_dim=mesh.replicate_axis)
    if mesh.replicate_axis is None:
        return common.FSDPMeshInfo(mesh.mesh, shard_mesh_dim=mesh.shard_axis)
    return common.HSDPMeshInfo(mesh.mesh, shard_mesh_dim=mesh.shard_axis, replicate_mesh_dim=mesh.replicate_axis)


def tracker_behind(hook: Any) -> Any:
    """torch's FSDPMemTracker that has made ``hook``."""
    return inspect.getclosurevars(hook).nonlocals["self"]


def count_as(tracker: Any, tensor: Any, kind: str) -> None:
    """Let the tracker count the tensor's memory as ``kind``, a name of its enum."""
    tracker._update_and_maybe_create_winfos(tensor, tracker._ref_class[kind])
