"""Which mesh axes shard and which replicate: a DeviceMesh read as data parallelism.

A 1-D mesh shards over its axis (FSDP); a 2-D mesh replicates over axis 0 and shards over axis 1 (HSDP). On a *full SPMD
mesh*, parameters already are DTensors: ``DataParallelMeshDims`` names the axes that shard and replicate, and the others
are model axes (tensor parallelism, ...).

Worked example: a (2, 4) mesh of 8 ranks, seen from rank 5:

    shard_size 4, shard_rank 1 (among ranks 4 5 6 7); replicate_size 2, replicate_rank 1 (among ranks 1 5)
    a parameter's DTensor placements are (Replicate(), Shard(0)); gradients are averaged over 8 ranks
"""

from __future__ import annotations

import functools
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from ...errors import ArgumentError, ArgumentTypeError, DeviceError, MeshError, got
from ...torch_names import torch_dtensors, torch_tensors


@dataclass(frozen=True)
class SpmdAxes:
    """The data-parallel axes of a full SPMD mesh, as ascending indices; several of one kind count as one flat axis."""

    mesh: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]

    @property
    def data(self) -> tuple[int, ...]:
        return tuple(sorted(self.shard + self.replicate))


@dataclass(frozen=True, eq=False)
class DataParallelMesh:
    """The data-parallel axes of a job as this rank sees them. Build it with ``data_parallel_mesh``.

    mesh:            the data-parallel DeviceMesh: (shard,), (replicate, shard) or (replicate,)
    shard_axis:      axis of ``mesh`` over which parameters are sharded; None: every rank has whole parameters
    replicate_axis:  axis over which they are replicated; None: there is none
    spmd:            the axes of the full SPMD mesh that ``mesh`` was taken from, if parameters are DTensors on it
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axis: int | None
    shard_group: dist.ProcessGroup | None
    shard_size: int
    shard_rank: int
    replicate_group: dist.ProcessGroup | None
    replicate_size: int
    spmd: SpmdAxes | None = None

    @property
    def size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.shard_size * self.replicate_size

    @property
    def device_type(self) -> str:
        return self.mesh.device_type

    def placements(self, on_shard_axis: Placement) -> tuple[Placement, ...]:
        """Placements on ``mesh`` of a tensor that is ``on_shard_axis`` over the shard axis and replicated elsewhere."""
        return tuple(on_shard_axis if axis == self.shard_axis else Replicate() for axis in range(self.mesh.ndim))

    @functools.cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks over which gradients are averaged, this one among them."""
        return frozenset(self.mesh.mesh.flatten().tolist())

    @property
    def groups(self) -> tuple[int, int]:
        """A key that is equal for two meshes that communicate over the same process groups."""
        return id(self.shard_group), id(self.replicate_group)


def data_parallel_mesh(
    mesh: DeviceMesh, *, shard_axis: int | None, replicate_axis: int | None = None, spmd: SpmdAxes | None = None
) -> DataParallelMesh:
    """Read ``mesh`` with the given meaning of its axes. Collective: no."""
    shard_group = mesh.get_group(shard_axis) if shard_axis is not None else None
    replicate_group = mesh.get_group(replicate_axis) if replicate_axis is not None else None
    return DataParallelMesh(
        mesh=mesh,
        shard_axis=shard_axis,
        replicate_axis=replicate_axis,
        shard_group=shard_group,
        shard_size=shard_group.size() if shard_group is not None else 1,
        shard_rank=shard_group.rank() if shard_group is not None else 0,
        replicate_group=replicate_group,
        replicate_size=replicate_group.size() if replicate_group is not None else 1,
        spmd=spmd,
    )


def read_mesh(mesh: DeviceMesh | None, dims: Any = None) -> DataParallelMesh:
    """The mesh argument of ``fully_shard``: 1-D shards, 2-D replicates and shards, None is the whole world.

    dims:       a DataParallelMeshDims, which names the data-parallel axes of ``mesh``, a full SPMD mesh then
    Collective: for None, which makes the world's mesh (and process group, if there is none yet), and the first time
                that several axes are flattened.
    Raises:     MeshError for any other value
    """
    if mesh is None:
        mesh = world_mesh()
    checked_mesh(mesh, "fully_shard")
    if dims is not None:
        return _read_spmd_mesh(mesh, dims)
    if mesh.ndim == 1:
        return data_parallel_mesh(mesh, shard_axis=0)
    if mesh.ndim == 2:
        if mesh.mesh_dim_names is None:
            raise MeshError(
                f"fully_shard got a 2-D mesh without axis names: {mesh}",
                expected="named axes, so that the replicate and the shard axis can be sliced out of it",
                fix='init_device_mesh(..., mesh_dim_names=("replicate", "shard"))',
            )
        return data_parallel_mesh(mesh, shard_axis=1, replicate_axis=0)
    raise MeshError(
        f"fully_shard got a {mesh.ndim}-D mesh: {mesh}",
        expected="a 1-D mesh (shard) or a 2-D mesh (replicate, shard)",
        fix="slice the data-parallel axes out of it by name, for instance mesh['dp'], or pass dp_mesh_dims",
    )


def checked_mesh(mesh: Any, caller: str, argument: str = "mesh") -> DeviceMesh:
    """``mesh``. Raises: ArgumentTypeError if it is no mesh; MeshError if it lacks this rank or devices lack streams."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            got(caller, argument, mesh),
            expected="a torch.distributed.device_mesh.DeviceMesh or None",
            fix="build one with init_device_mesh(device_type, (world_size,))",
        )
    if not torch_tensors.has_streams(mesh.device_type):
        raise MeshError(
            f"{caller} got a mesh of {mesh.device_type} devices, "
            f"and torch.{mesh.device_type} lacks streams of a device",
            expected="devices on which collectives can be ordered after computation: cuda, xpu, or the cpu",
            fix='train on the CPU: init_device_mesh("cpu", (world_size,))',
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"{caller} got a mesh that this rank is not part of: {mesh}",
            expected="a mesh whose ranks include the one that makes the call",
            fix=f"call {caller} on the ranks of the mesh only, or pass each rank the mesh that it is in",
        )
    return mesh


def read_mesh_info(info: Any) -> DataParallelMesh:
    """Read ``ShardPlacementResult.mesh_info``: a DeviceMesh like ``fully_shard``'s, or torch's description of one."""
    if isinstance(info, DeviceMesh):
        return read_mesh(info)
    dims = getattr(info, "dp_mesh_dims", None)
    if dims is not None:
        return read_mesh(info.spmd_mesh, dims)
    mesh = getattr(info, "mesh", None)
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            got("ShardPlacementResult", "mesh_info", info),
            expected="a DeviceMesh (1-D to shard, 2-D to replicate and shard), or an FSDPMeshInfo of torch",
            fix='for instance ShardPlacementResult(Shard(0), mesh["ep"])',
        )
    return data_parallel_mesh(mesh, shard_axis=info.shard_mesh_dim, replicate_axis=info.replicate_mesh_dim)


def _read_spmd_mesh(mesh: DeviceMesh, dims: Any) -> DataParallelMesh:
    axis_names = mesh.mesh_dim_names
    if axis_names is None:
        raise MeshError(
            f"fully_shard got dp_mesh_dims for a mesh without axis names: {mesh}",
            expected="a mesh with mesh_dim_names when dp_mesh_dims is given",
            fix='init_device_mesh(..., mesh_dim_names=("dp", "tp"))',
        )
    shard_names, replicate_names = _names_of(dims, "shard"), _names_of(dims, "replicate")
    names = shard_names + replicate_names
    unknown = [name for name in names if name not in axis_names]
    if not names or unknown or len(set(names)) < len(names):
        problem = f"{unknown} not found in mesh.mesh_dim_names {axis_names}" if unknown else f"got {dims}"
        raise MeshError(
            f"dp_mesh_dims does not fit the mesh: {problem}",
            expected=f"at least one of shard and replicate must be set, each with names out of {axis_names}, "
            "none of them twice",
            fix='for instance DataParallelMeshDims(shard="dp")',
        )
    axes = SpmdAxes(
        mesh,
        tuple(sorted(axis_names.index(name) for name in shard_names)),
        tuple(sorted(axis_names.index(name) for name in replicate_names)),
    )
    flat = [
        torch_dtensors.flatten_mesh(mesh, tuple(axis_names[axis] for axis in some))
        for some in (axes.replicate, axes.shard)
        if some
    ]
    if not axes.shard:
        return data_parallel_mesh(flat[0], shard_axis=None, replicate_axis=0, spmd=axes)
    if not axes.replicate:
        return data_parallel_mesh(flat[0], shard_axis=0, spmd=axes)
    return data_parallel_mesh(torch_dtensors.concatenate_meshes(flat), shard_axis=1, replicate_axis=0, spmd=axes)


def _names_of(dims: Any, field: str) -> tuple[str, ...]:
    value = getattr(dims, field, ())
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def world_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks on the default device. Collective if the default process group does not exist yet.

    Raises: MeshError if there is no process group, and no environment to make it from
    """
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise MeshError(
                f"there is no process group, and no torchrun started this process: {', '.join(missing)} not set",
                expected="several processes that know each other",
                fix="start this with torchrun --nproc-per-node 2 SCRIPT, "
                "or call torch.distributed.init_process_group before",
            )
        dist.init_process_group()
    return init_device_mesh(torch_tensors.default_device_type(), (dist.get_world_size(),))


def device_of(mesh: DeviceMesh | DataParallelMesh) -> torch.device:
    """This rank's device: the current device of the mesh's type. Raises: DeviceError if this torch or host has none"""
    try:
        return torch_tensors.current_device(mesh.device_type)
    except (AssertionError, RuntimeError) as error:
        raise DeviceError(
            f"the mesh is of {mesh.device_type} devices, and there are none: {error}",
            expected="a mesh of devices that this host has, and that this torch was built for",
            fix='init_process_group("gloo") and init_device_mesh("cpu", ...), or install torch for these devices',
        ) from error


_smaller: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, DataParallelMesh]] = weakref.WeakKeyDictionary()


def post_forward_mesh(mesh: DataParallelMesh, size: int) -> DataParallelMesh:
    """Sub-groups of ``size`` consecutive shard ranks, to which parameters are resharded after forward.

    Collective: yes, over the default group, at the first call for a shard axis and size: it makes process groups.
    """
    assert mesh.shard_axis is not None
    assert mesh.shard_group is not None
    known = _smaller.setdefault(mesh.shard_group, {})
    if size not in known:
        names = mesh.mesh.mesh_dim_names
        if names is None:  # then it is no slice: its ranks are all ranks of the mesh
            ranks = mesh.mesh.mesh.reshape(-1, size)
            known[size] = data_parallel_mesh(DeviceMesh(mesh.device_type, ranks), shard_axis=1, replicate_axis=0)
        else:  # cut the axis in two, so that the result goes together with model axes of the same mesh
            name = names[mesh.shard_axis]
            parts = (f"{name}_by_{size}", f"{name}_in_{size}")
            smaller = torch_dtensors.unflatten_mesh(mesh.mesh, mesh.shard_axis, (mesh.shard_size // size, size), parts)
            known[size] = data_parallel_mesh(smaller, shard_axis=mesh.shard_axis + 1)
    return known[size]
