"""The ranks over which an FSDP module is sharded and replicated, and its device: reads FSDP1's arguments once.

``process_group`` is a group, or for hybrid strategies a pair (shard, replicate); ``device_mesh`` is 1-D, or for hybrid strategies
2-D (replicate, shard). All modules that name the same ranks share one mesh.

Worked example, 8 ranks on 2 nodes, HYBRID_SHARD, neither given: a mesh ((0, 1, 2, 3), (4, 5, 6, 7)); rank 5 shards over 4 to 7 and
replicates over 1 and 5.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..core.comm.collective_log import during
from ..core.plan.mesh import DataParallelMesh, checked_mesh, data_parallel_mesh
from ..errors import ArgumentError, MeshError, got
from ..strategy.meshes import node_size
from ..torch_names import torch_tensors
from .api import ShardingStrategy

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_NAMES = ("replicate", "shard")

_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()


def read_groups(strategy: ShardingStrategy, process_group: Any, device_mesh: Any, device_type: str) -> DataParallelMesh:
    """The ranks that ``strategy`` shards and replicates over.

    Collective: for a hybrid strategy, yes, over all ranks, the first time for a pair of groups, or for neither.
    Raises:     ArgumentError if both are given, one is of a wrong type, or nodes do not divide the ranks; MeshError if it does not go
                with the strategy.
    """
    hybrid = strategy in HYBRID
    if all(given is not None for given in (process_group, device_mesh)):
        raise ArgumentError(
            "FSDP got both process_group and device_mesh",
            expected="at most one of them",
            fix="leave process_group out: a device_mesh has its groups",
        )
    if device_mesh is not None:
        mesh = _checked_mesh(device_mesh, strategy)
    elif hybrid:
        mesh = _hybrid_mesh(strategy, process_group, device_type)
    else:
        group = _checked_group(strategy, process_group)
        mesh = _shared(group, device_type, lambda: DeviceMesh.from_group(group, device_type))
    if hybrid:
        return data_parallel_mesh(mesh, shard_axis=1, replicate_axis=0)
    if strategy is ShardingStrategy.NO_SHARD:
        return data_parallel_mesh(mesh, shard_axis=None, replicate_axis=0)
    return data_parallel_mesh(mesh, shard_axis=0)


def _checked_mesh(given: Any, strategy: ShardingStrategy) -> DeviceMesh:
    mesh = checked_mesh(given, "FSDP", "device_mesh")
    wanted = 2 if strategy in HYBRID else 1
    if mesh.ndim == 2 and wanted == 1 and mesh.size(1) == 1:
        return mesh  # FSDP1 shards over axis 0 as well; over another axis of several ranks nothing would average the gradients
    if mesh.ndim != wanted:
        raise MeshError(
            f"FSDP got a {mesh.ndim}-D device_mesh for {strategy.name}: {mesh}",
            expected="2-D (replicate, shard) for hybrid strategies" if wanted == 2 else "1-D for strategies that are not hybrid",
            fix="slice the data-parallel axes out of the mesh by name, or choose another sharding_strategy",
        )
    if wanted == 2 and mesh.mesh_dim_names is None:
        groups = [mesh.get_group(0), mesh.get_group(1)]
        named = functools.partial(DeviceMesh.from_group, groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=_NAMES)
        return _shared(groups[0], (groups[1].group_name, mesh.device_type), named)
    return mesh


def _checked_group(strategy: ShardingStrategy, process_group: Any) -> dist.ProcessGroup:
    if process_group is None:
        if not dist.is_initialized():
            dist.init_process_group()
        process_group = dist.group.WORLD
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    raise ArgumentError(
        f"{got('FSDP', 'process_group', process_group)} for {strategy.name}",
        expected="a ProcessGroup that this rank is in; a pair (shard, replicate) of them for hybrid strategies",
        fix="pass torch.distributed.new_group(...), or choose a hybrid sharding_strategy",
    )


def _shared(group: dist.ProcessGroup, key: Any, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """The mesh that all modules share that name ``group`` and what else is in ``key``; made by the first of them."""
    known = _meshes.setdefault(group, {})
    if key not in known:
        known[key] = make()
    return known[key]


def _hybrid_mesh(strategy: ShardingStrategy, process_group: Any, device_type: str) -> DeviceMesh:
    if process_group is None:
        world = _checked_group(strategy, None)
        devices = world.size() if device_type == "cpu" else torch.get_device_module(device_type).device_count()
        size = node_size(strategy.name, world.size(), None, by_default=devices)
        shape = (world.size() // size, size)
        return _shared(world, (size, device_type), lambda: init_device_mesh(device_type, shape, mesh_dim_names=_NAMES))
    if not isinstance(process_group, (tuple, list)) or len(process_group) != 2:
        raise ArgumentError(
            f"{got('FSDP', 'process_group', process_group)} for {strategy.name}",
            expected="a pair of process groups (shard, replicate), or None for nodes",
            fix="pass a pair, or a 2-D device_mesh (replicate, shard)",
        )
    shard, replicate = (_checked_group(strategy, group) for group in process_group)

    def of_pair() -> DeviceMesh:
        rows: list[Any] = [None] * replicate.size()
        with during("agreement of ranks", replicate):
            dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
        ranks = torch.tensor(rows, device="cpu")
        return DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=_NAMES)

    return _shared(shard, (replicate.group_name, device_type), of_pair)


# --- the device ---------------------------------------------------------------------------------------------------------------


def read_device(device_id: Any, device_mesh: Any, tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where a module lives: ``device_id``, else where the mesh is, else where its tensors are, else the accelerator or the CPU.

    An int is the index of an accelerator; without accelerators it is ignored. Raises: ArgumentError for anything else.
    """
    default = torch_tensors.default_device_type()
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        return torch.device(default) if default == "cpu" else torch.device(default, device_id)
    try:
        if isinstance(device_id, (str, torch.device)):
            return torch.device(device_id)
    except RuntimeError:
        pass  # a word that names no device: the error below
    if device_id is not None:
        raise ArgumentError(
            got("FSDP", "device_id", device_id),
            expected="an int or a torch.device",
            fix="for instance device_id=torch.cuda.current_device(), without quotation marks and with parentheses",
        )
    if isinstance(device_mesh, DeviceMesh):
        return torch.device(device_mesh.device_type)
    return next((each.device for each in tensors if each.device.type not in ("cpu", "meta")), torch.device(default))


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, ``device`` is the current one of its type."""
    if device.type == "cpu" or device.index is None:
        return contextlib.nullcontext()
    return torch.get_device_module(device.type).device(device)  # type: ignore[no-any-return]
