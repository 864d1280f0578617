"""One collective after which every rank goes on, or every rank raises the same error.

Worked example: rank 2 of 4 finds the disk full. It calls ``agree(group, error)``, the others ``agree(group, None)``; all four raise
rank 2's CheckpointError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core import torch_compat as compat
from ..errors import FSDPError

T = TypeVar("T")


def default_group() -> dist.ProcessGroup | None:
    """All ranks; None if there is but this one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def agree(process_group: dist.ProcessGroup | None, problem: FSDPError | None, said: T) -> list[T]:
    """What every rank says, by rank of the group. Collective: yes.

    Raises: the problem of the lowest rank that has one, on every rank
    """
    everyone: list[tuple[FSDPError | None, T]] = [(problem, said)]
    if process_group is not None:
        everyone *= process_group.size()
        dist.all_gather_object(everyone, (problem, said), group=process_group)
    problems = [each for each, _ in everyone if each is not None]
    if problems:
        raise problem if problem is not None and str(problem) == str(problems[0]) else problems[0]
    return [each for _, each in everyone]


def agree_on_meshes(meshes: Sequence[DeviceMesh], problem: FSDPError | None) -> None:
    """All ranks of ``meshes`` go on, or raise if one of them has a problem. No meshes: this rank decides alone.

    Costs an all-reduce of 8 bytes for each axis of more than one rank; only if some rank has a problem, that is told as well.
    A mesh that lies within another needs none of its own. Where several overlap, what a rank of one says goes through a rank of both
    into the other: as many rounds as there are meshes reach all.

    meshes:     the same, in the same order, on all ranks of each
    Collective: yes, over each mesh
    Raises:     the problem of this rank, or one of those that there are
    """
    outer = _outermost(meshes)
    axes = [(mesh, axis) for _ in outer for mesh in outer for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    failed = problem is not None
    for mesh, axis in axes:
        kind = mesh.device_type
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, compat.device_module(kind).current_device())
        flag = torch.tensor(int(failed), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        failed = bool(flag.item())
    if not failed:
        return
    for mesh, axis in axes:
        told: list[FSDPError | None] = [None] * mesh.size(axis)
        dist.all_gather_object(told, problem, group=mesh.get_group(axis))
        problem = problem or next((each for each in told if each is not None), None)
    assert problem is not None
    raise problem


def _outermost(meshes: Sequence[DeviceMesh]) -> list[DeviceMesh]:
    """Those whose ranks are not all in another one."""
    by_ranks: dict[frozenset[int], DeviceMesh] = {}
    for mesh in meshes:
        by_ranks.setdefault(frozenset(mesh.mesh.flatten().tolist()), mesh)
    return [mesh for ranks, mesh in by_ranks.items() if not any(ranks < other for other in by_ranks)]
