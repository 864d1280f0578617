"""The mesh of a strategy: made from all ranks or from the user's mesh, checked before the first collective, made once.

Worked example, 8 ranks, LOCAL_WORLD_SIZE=4:

   ddp            (8, 1)   every rank a replica, a shard axis of one
   zero1 ... 3    (8,)
   hsdp           (2, 4)   two nodes; ranks 4 to 7 are the second
   hsdp_global    (8,), whose parts of 4 consecutive ranks are nodes
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..core.plan.mesh import checked_mesh
from ..errors import ArgumentError, MeshError, OrderError
from ..torch_names import torch_dtensors, torch_tensors

AXES = ("replicate", "shard")

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()


def flat_mesh(name: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """The 1-D mesh for strategy ``name``: over all ranks, or those of ``mesh`` if it is given.

    Collective: where it makes a process group, at the first call.
    Raises:     MeshError unless ``mesh`` is 1-D; OrderError if there are no processes.
    """
    if mesh is None:
        _require_processes()
        world = dist.get_world_size()
        return _once(("world", world), lambda: init_device_mesh(torch_tensors.default_device_type(), (world,)))
    if checked_mesh(mesh, "parallelize").ndim != 1:
        raise MeshError(
            f"strategy {name!r} got a {mesh.ndim}-D mesh: {mesh}",
            expected="a 1-D mesh of all data-parallel ranks, or None",
            fix='pass mesh["dp"], or use "hsdp" for a mesh of nodes and their ranks',
        )
    return mesh


def replicated_mesh(name: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh (W, 1): every rank keeps everything. Collective and raises: as ``flat_mesh``; ``mesh`` may be such a 2-D mesh."""
    if mesh is not None and checked_mesh(mesh, "parallelize").ndim == 2 and mesh.size(1) == 1:
        return mesh
    flat = flat_mesh(name, mesh)
    return _cut(flat, (flat.size(), 1))


def node_mesh(name: str, mesh: DeviceMesh | None, shard_size: int | None) -> DeviceMesh:
    """The mesh (nodes, ranks of a node). Collective: where it makes process groups, at the first call.

    Raises: MeshError for a mesh with more axes, or if ``shard_size`` is not its last; ArgumentError if it does not divide the ranks.
    """
    if mesh is None or checked_mesh(mesh, "parallelize").ndim != 2:
        flat = flat_mesh(name, mesh)
        size = node_size(name, flat.size(), shard_size)
        return _cut(flat, (flat.size() // size, size))
    _check_last_axis(name, mesh, shard_size)
    return mesh


def flat_mesh_of_nodes(name: str, mesh: DeviceMesh | None, shard_size: int | None) -> tuple[DeviceMesh, int]:
    """The 1-D mesh over all ranks, and how many consecutive ranks are a node. Collective and raises: as ``node_mesh``."""
    if mesh is None or checked_mesh(mesh, "parallelize").ndim != 2:
        flat = flat_mesh(name, mesh)
        return flat, node_size(name, flat.size(), shard_size)
    _check_last_axis(name, mesh, shard_size)
    names = mesh.mesh_dim_names
    if names is None:
        ranks = mesh.mesh.flatten()
        return _once(("flat", mesh), lambda: DeviceMesh(mesh.device_type, ranks)), mesh.size(1)
    return torch_dtensors.flatten_mesh(mesh, names), mesh.size(1)


def node_size(name: str, num_ranks: int, shard_size: int | None, by_default: int | None = None) -> int:
    """Ranks of a node: the user's number, else the launcher's, else ``by_default``.

    Raises: ArgumentError if there is none, or if it is no factor of ``num_ranks``.
    """
    given: Any = shard_size
    source = "shard_size"
    if given is None and (text := os.environ.get("LOCAL_WORLD_SIZE")) is not None:
        source = "the environment variable LOCAL_WORLD_SIZE, the default size of a node,"
        given = int(text) if text.isdigit() else text
    elif given is None:
        source = "the number of devices of this host"
        given = by_default
    if given is None:
        raise ArgumentError(
            f"strategy {name!r} got neither shard_size nor a 2-D mesh",
            expected="the number of ranks that share one copy of the parameters, or torchrun's LOCAL_WORLD_SIZE",
            fix="pass shard_size, the number of ranks on a node",
        )
    if isinstance(given, bool) or not isinstance(given, int) or given < 1 or num_ranks % given:
        factors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
        raise ArgumentError(
            f"strategy {name!r}: {source} is {given!r}, and there are {num_ranks} ranks",
            expected=f"a factor of the number of ranks: {factors}",
            fix="start as many ranks on each node, or say which ranks are one: shard_size, a 2-D mesh"
            if shard_size is None
            else f"pass shard_size={max(number for number in factors if number == 1 or number <= _whole(given))}, or start more ranks",
        )
    return given


def _whole(number: Any) -> int:
    return number if isinstance(number, int) else 1


def _require_processes() -> None:
    if dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        if not dist.is_initialized():
            dist.init_process_group()
        return
    raise OrderError(
        "parallelize got no mesh, and there is no process group",
        expected="a program started by torchrun, or one that has called torch.distributed.init_process_group()",
        fix="torchrun --nproc-per-node 2 script.py",
    )


def _check_last_axis(name: str, mesh: DeviceMesh, shard_size: int | None) -> None:
    if shard_size is not None and shard_size != mesh.size(1):
        raise MeshError(
            f"strategy {name!r} got shard_size={shard_size} and a mesh whose last axis has {mesh.size(1)} ranks: {mesh}",
            expected="one of the two, or the same size in both",
            fix="leave shard_size out",
        )


def _cut(flat: DeviceMesh, shape: tuple[int, int]) -> DeviceMesh:
    """``flat`` with its one axis cut in two."""
    names = flat.mesh_dim_names
    if names is None:
        ranks = flat.mesh.reshape(shape)
        return _once((flat, shape), lambda: DeviceMesh(flat.device_type, ranks, mesh_dim_names=AXES))
    # ``flat`` may be a slice: the result has to go together with the other axes of the same mesh.
    parts = (f"{names[0]}_{AXES[0]}", f"{names[0]}_{AXES[1]}")
    return _once((flat, shape), lambda: torch_dtensors.unflatten_mesh(flat, 0, shape, parts))


def _once(key: Any, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Calls for the same key share one mesh, and so its process groups, as long as the processes are the same."""
    world = dist.group.WORLD
    assert world is not None
    known = _made.setdefault(world, {})
    if key not in known:
        known[key] = make()
    return known[key]
