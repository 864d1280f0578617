"""One collective after which every rank goes on, or every rank raises the same error.

Worked example: rank 2 of 4 finds the disk full. It calls ``agree(group, error)``, the others ``agree(group, None)``;
all four raise rank 2's CheckpointError. Where it finds it between collectives it calls ``tell_later(error)``, and the
next agreement is the same.

Note: names of process groups. torch names a process group by how many groups the process has made, or by its ranks and
that number, and ranks find each other under the name. So ranks that have made different numbers of groups wait for each
other under different names, for ever; and from torch 2.14 on, a group of some ranks shifts the numbers of these ranks
for all later groups (before, for later groups of some ranks). Our group has a name that its ranks agree on, and leaves
torch's counts as they were: it neither depends on the groups that were made before, nor changes those that are made
later. How users' own groups affect each other is up to torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ... import errors
from ...errors import CheckpointError, FSDPError, LostRankError
from ...lost_ranks import raise_lost
from ...torch_names import torch_collectives
from ..plan.mesh import DataParallelMesh, device_of
from . import backends
from .collective_log import during

T = TypeVar("T")
Axis = tuple[dist.ProcessGroup, torch.device]
"""A process group, and the device on which its ranks communicate."""


def default_group() -> dist.ProcessGroup | None:
    """The process group of all ranks; None if this rank is the only one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def agree(process_group: dist.ProcessGroup | None, problem: FSDPError | None, said: T) -> list[T]:
    """What every rank has ``said``, by rank of the group. Collective: yes.

    Raises: the problem of the lowest rank that has one, on every rank; LostRankError if a rank does not answer
    """
    return list(told_over([] if process_group is None else [process_group], said, problem).values())


def told_over(process_groups: Sequence[dist.ProcessGroup], said: T, problem: FSDPError | None = None) -> dict[int, T]:
    """What each rank that ``process_groups`` reach one after another has ``said``, by its number.

    Collective: yes, over each group
    Raises:     as ``agree``
    """
    problem = problem or take_untold()
    everyone = _told(process_groups, problem, said)
    problems = [each for each, _ in everyone.values() if each is not None]
    if problems:
        raise problem if problem is not None and str(problem) == str(problems[0]) else problems[0]
    return {rank: each for rank, (_, each) in everyone.items()}


def _told(
    process_groups: Sequence[dist.ProcessGroup], problem: FSDPError | None, said: T
) -> dict[int, tuple[FSDPError | None, T]]:
    """The problem and the ``said`` of each rank that the groups reach. Collective: yes. Raises: LostRankError"""
    if not process_groups:
        return {0: (problem, said)}
    told = {dist.get_rank(): _packed(problem, said)}
    for process_group in process_groups:
        parcels = [told] * process_group.size()
        with reached(process_group, problem), during("agreement of ranks", process_group):
            dist.all_gather_object(parcels, told, group=process_group)
        told = {rank: packed for parcel in parcels for rank, packed in parcel.items()}
    return {rank: pickle.loads(packed) for rank, packed in told.items()}


def _packed(problem: FSDPError | None, said: object) -> bytes:
    """Both as bytes that every rank can read; if pickling fails, that becomes this rank's problem."""
    if problem is not None and type(problem).__module__ != errors.__name__:  # a user's class: other ranks may lack it
        problem = CheckpointError(str(problem))
    try:
        return pickle.dumps((problem, said))
    except Exception as error:
        text = f"this rank cannot send its state to the others: {type(error).__name__}: {error}"
        problem = problem or CheckpointError(text, expected="values that can be pickled", fix="fix the cause")
        return pickle.dumps((CheckpointError(str(problem)), None))


@contextlib.contextmanager
def reached(process_group: dist.ProcessGroup | None, problem: FSDPError | None = None) -> Iterator[None]:
    """Around a collective: the backend's error about a lost rank becomes a LostRankError, now and at each later use.

    problem: this rank's own, which the error reports as well
    """
    if isinstance(problem, LostRankError):
        raise problem
    try:
        if is_lost(process_group):
            raise RuntimeError("an earlier collective has failed")
        yield
    except Exception as error:
        if process_group is not None:
            _lost.add(process_group)
        raise_lost(error, "an agreement of the ranks", problem)


_lost: WeakSet[dist.ProcessGroup] = WeakSet()


def is_lost(process_group: dist.ProcessGroup | None) -> bool:
    """Whether a collective of the group has failed: its ranks are then no longer at the same one."""
    return process_group in _lost


def tell_later(problem: FSDPError) -> None:
    """Note a problem that this rank has found where ranks do not meet: the next agreement tells it to all of its ranks.

    Until then this rank takes part in all collectives, so that none of the others waits for it.
    """
    _untold.append(problem)


def has_untold() -> bool:
    return bool(_untold)


def take_untold() -> FSDPError | None:
    """The first problem that was to be told later; all of them are forgotten."""
    problem = next(iter(_untold), None)
    _untold.clear()
    return problem


_untold: list[FSDPError] = []


def agree_on_meshes(meshes: Sequence[DeviceMesh], problem: FSDPError | None) -> None:
    """Let all ranks of ``meshes`` go on, or raise if a rank of them has a problem. No meshes: this rank decides alone.

    Costs an all-reduce of 8 bytes for each axis of more than one rank; only if a rank has a problem, ranks send it as
    well. A mesh that lies within another needs no collective of its own. Where meshes overlap, a rank of both carries
    the answer from one to the other: one round per mesh reaches all ranks.

    meshes:     the same, in the same order, on all ranks of each
    Collective: yes, over each mesh
    Raises:     this rank's problem, or else that of another rank
    """
    agree_over(axes_of(meshes), problem)


def axes_of(meshes: Sequence[DeviceMesh]) -> list[Axis]:
    """The axes whose collectives, one after another, carry an answer to all ranks of ``meshes``."""
    outer = outermost(meshes)
    axes = [(mesh, axis) for _ in outer for mesh in outer for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return [(mesh.get_group(axis), device_of(mesh)) for mesh, axis in axes]


def agree_over(axes: Sequence[Axis], problem: FSDPError | None) -> None:
    """Let all ranks that ``axes`` reach one after another go on, or raise if a rank of them has a problem.

    Collective: yes, over each of ``axes``, in this order, which is the same on all of their ranks
    Raises:     this rank's problem, or else that of another rank
    """
    problem = problem or take_untold()
    if largest_over(axes, int(problem is not None), problem=problem) == [0]:
        return
    told = _told([group for group, _ in axes], problem, None)
    raise problem or next(each for each, _ in told.values() if each is not None)


def largest_over(
    axes: Sequence[Axis], *values: int, problem: FSDPError | None = None, what: str = "agreement of ranks"
) -> list[int]:
    """The largest of each of ``values``, of all ranks that ``axes`` reach one after another.

    problem, what: as in ``reached`` and ``during``
    Collective:    yes, over each of ``axes``
    """
    largest = list(values)
    for group, device in axes:
        with reached(group, problem):
            found = torch.tensor(largest, device=device)
            with during(what, group, found):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            largest = found.tolist()
    return largest


def all_say(said: object, axes: Sequence[Axis], what: str) -> bool:
    """Whether all ranks that ``axes`` reach one after another have ``said`` the same, and none has a problem to tell.

    Costs an all-reduce of 16 bytes for each axis. Collective: yes, over each of ``axes``. what: as in ``during``
    """
    checksum = zlib.crc32(repr(said).encode())
    # As a rank with a problem says both, they are equal on no rank.
    values = (1 << 32, 1 << 32) if has_untold() else (checksum, -checksum)
    largest, negative_of_least = largest_over(axes, *values, what=what)
    return largest == -negative_of_least


def outermost(meshes: Sequence[DeviceMesh]) -> list[DeviceMesh]:
    """The meshes whose ranks do not all belong to another one of ``meshes``."""
    by_ranks: dict[frozenset[int], DeviceMesh] = {}
    for mesh in meshes:
        by_ranks.setdefault(frozenset(mesh.mesh.flatten().tolist()), mesh)
    return [mesh for ranks, mesh in by_ranks.items() if not any(ranks < other for other in by_ranks)]


def another_over(process_group: dist.ProcessGroup, name: str, backend: str | None = None) -> dist.ProcessGroup:
    """A new process group over the ranks of ``process_group``, with its time-out: the two need not wait for each other.

    name:    what tools show as its description
    backend: None: that of the default group
    Collective: yes, over these ranks
    """
    return joined_over([process_group], dist.get_process_group_ranks(process_group), name, backend)


def joined_over(
    process_groups: Sequence[dist.ProcessGroup], ranks: Sequence[int], name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """A new process group over ``ranks``, the time-out and the other arguments as in ``another_over``.

    process_groups: of the axes of the mesh that these ranks make
    """
    device = torch_collectives.device_of_group(process_groups[0])
    drawn = torch.tensor([int.from_bytes(os.urandom(7), "big")], device=device)
    for process_group in process_groups:
        with during("agreement of ranks", process_group, drawn):
            dist.broadcast(drawn, src=dist.get_process_group_ranks(process_group)[0], group=process_group)
    timeout = torch_collectives.timeout_of_group(process_groups[0])
    return torch_collectives.new_named_group(
        list(ranks), backend, f"fsdp2_{name}", f"fsdp2_{name}_{drawn.item():x}", timeout
    )


_channels: WeakKeyDictionary[dist.ProcessGroup, tuple[frozenset[int], dist.ProcessGroup]] = WeakKeyDictionary()
"""By a process group of the mesh: its ranks, and the process group of their messages, kept for the next time."""


def groups_of(mesh: DataParallelMesh) -> list[dist.ProcessGroup]:
    """The process groups of its axes of more than one rank."""
    return [group for group in (mesh.shard_group, mesh.replicate_group) if group is not None and group.size() > 1]


def messages_over(mesh: DataParallelMesh) -> dist.ProcessGroup | None:
    """A process group for messages of the hosts, which wait for no device; None if there is nobody to tell.

    Collective: yes, over ``mesh``, the first time
    """
    groups = groups_of(mesh)
    if not groups or not backends.moves_data(backends.backend_of(groups[0], mesh.device_type)):
        return None
    ranks, channel = _channels.get(groups[-1], (None, None))
    if channel is None or ranks != mesh.ranks:
        channel = joined_over(groups, sorted(mesh.ranks), "messages", "gloo")
        _channels[groups[-1]] = mesh.ranks, channel
    return channel


@atexit.register
def _end_messages() -> None:
    """Wait until gloo's threads have let go of the last messages.

    They do so after the messages have arrived, and need the interpreter for it. If Python ends first, it unwinds such a
    thread by force, which C++ does not allow: a program that went well would abort at its very end.
    """
    channels = [channel for _, channel in _channels.values()]
    _channels.clear()
    while channels:
        with contextlib.suppress(ValueError):  # destroyed before, with the default group
            dist.destroy_process_group(channels[-1])
        channels.pop()  # the last reference: its threads end here
