"""Functions of whole matrices that ranks hold in pieces: each matrix goes to one rank, its *owner*, and the result comes back.

Gathering each matrix on every rank moves W times as much and computes everything W times. Here matrices are dealt to the ranks of their
shard group by cost, the dearest first to whoever has least so far (longest processing time first: R. L. Graham 1969), and go in
*rounds* of one matrix an owner: one all-to-all to the owners, the function, one all-to-all back. While owners compute a round, the next
one is on its way to them. What is computed is up to the caller: what Shampoo or SOAP do to a matrix would fit as well as Muon.

Cost model: a rank sends and receives, each way, its piece of every matrix; it computes what it owns. The step is as long as that of the
rank that owns most, which is at most 4/3 of an even share, or the dearest matrix alone.

Worked example, 2 ranks, matrices of cost 9, 5, 4, 1

    owners    rank 0: 9, 1    rank 1: 5, 4
    rounds    (9, 5), (1, 4)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.comm.collective_log import during
from ..errors import ParameterError
from ..torch_names import torch_dtensors

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cut:
    """How a matrix lies on the ranks of a process group: ``sizes[rank]`` rows of ``dim``."""

    process_group: dist.ProcessGroup
    dim: int
    sizes: tuple[int, ...]

    def piece_numel(self, shape: torch.Size, rank: int) -> int:
        return shape.numel() // max(shape[self.dim], 1) * self.sizes[rank]


def cut_of(param: Tensor, name: str) -> Cut | None:
    """How ``param`` is cut; None if this rank has all of it, or whole matrices of a batch.

    Raises: ParameterError if several mesh axes cut it
    """
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    axes = [axis for axis, placement in enumerate(param.placements) if mesh.size(axis) > 1 and not placement.is_replicate()]
    if not axes:
        return None
    dim = torch_dtensors.shard_dim(param.placements[axes[0]])
    if len(axes) > 1 or dim is None:
        raise ParameterError(
            f"{name} {tuple(param.shape)} is placed as {param.placements}",
            expected="matrices that one mesh axis cuts",
            fix="give it to AdamW: {'params': [...], 'use_muon': False}",
        )
    if param.dim() > 2 and dim < param.dim() - 2:
        return None  # a batch of matrices; this rank has some of them whole
    size, num_ranks = param.shape[dim], mesh.size(axes[0])
    rows = -(-size // num_ranks)
    sizes = tuple(max(min(rows, size - rank * rows), 0) for rank in range(num_ranks))
    return Cut(mesh.get_group(axes[0]), dim, sizes)


@dataclass(frozen=True)
class Job:
    """One matrix to compute.

    piece: this rank's, as a local tensor, in the dtype in which it travels; the result has the same
    shape: of the whole
    cost:  of computing it, in any unit
    """

    piece: Tensor
    shape: torch.Size
    cut: Cut
    cost: float


def compute_by_owners(jobs: Sequence[Job], function: Function) -> list[Tensor]:
    """``function`` of every whole matrix, and of the results this rank's pieces, in the order of ``jobs``.

    Collective: yes, over the process group of each cut; all ranks pass the same jobs in the same order.
    """
    results: list[Tensor | None] = [None] * len(jobs)
    by_group: dict[str, list[int]] = {}
    for index, job in enumerate(jobs):
        by_group.setdefault(job.cut.process_group.group_name, []).append(index)
    for indices in by_group.values():
        with during("exchange of matrices", jobs[indices[0]].cut.process_group):
            _compute_in_rounds(indices, jobs, function, results)
    return [result for result in results if result is not None]


def rounds_of(costs: Sequence[float], num_owners: int) -> list[list[int | None]]:
    """Which of the matrices each owner has in each round; None: it has no more."""
    owned: list[list[int]] = [[] for _ in range(num_owners)]
    loads = [0.0] * num_owners
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = loads.index(min(loads))
        owned[owner].append(index)
        loads[owner] += costs[index]
    num_rounds = max(map(len, owned), default=0)
    return [[each[number] if number < len(each) else None for each in owned] for number in range(num_rounds)]


def _compute_in_rounds(indices: list[int], jobs: Sequence[Job], function: Function, results: list[Tensor | None]) -> None:
    process_group = jobs[indices[0]].cut.process_group
    rank = process_group.rank()
    rounds = [
        [None if place is None else indices[place] for place in owners]
        for owners in rounds_of([jobs[index].cost for index in indices], process_group.size())
    ]
    on_its_way = _send_to_owners(rounds[0], jobs, process_group)
    coming_back: list[tuple[list[int | None], Any, Tensor]] = []
    for number, owners in enumerate(rounds):
        work, received = on_its_way
        if number + 1 < len(rounds):
            on_its_way = _send_to_owners(rounds[number + 1], jobs, process_group)
        with during("exchange of whole matrices", None):
            work.wait()
        mine = owners[rank]
        result = None if mine is None else function(_assembled(received, jobs[mine]))
        coming_back.append((owners, *_send_back(owners, jobs, process_group, result)))
    for owners, work, received in coming_back:
        with during("exchange of whole matrices", None):
            work.wait()
        pieces = torch.split(received, [0 if index is None else jobs[index].piece.nbytes for index in owners])
        for index, piece in zip(owners, pieces, strict=True):
            if index is not None:
                job = jobs[index]
                rows_first = job.piece.movedim(job.cut.dim, 0)
                results[index] = piece.view(job.piece.dtype).view(rows_first.shape).movedim(0, job.cut.dim)


def _send_to_owners(owners: list[int | None], jobs: Sequence[Job], process_group: dist.ProcessGroup) -> tuple[Any, Tensor]:
    """Bytes of this rank's pieces, owner by owner, for those of its own matrix, rank by rank."""
    device = next(jobs[index].piece.device for index in owners if index is not None)
    pieces = [_bytes_of(None if index is None else jobs[index].piece.movedim(jobs[index].cut.dim, 0), device) for index in owners]
    mine = owners[process_group.rank()]
    sizes = [0] * process_group.size() if mine is None else _nbytes_of_pieces(jobs[mine])
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    work = dist.all_to_all_single(received, torch.cat(pieces), sizes, [piece.numel() for piece in pieces], process_group, async_op=True)
    return work, received


def _send_back(
    owners: list[int | None], jobs: Sequence[Job], process_group: dist.ProcessGroup, result: Tensor | None
) -> tuple[Any, Tensor]:
    device = next(jobs[index].piece.device for index in owners if index is not None)
    mine = owners[process_group.rank()]
    sent, sizes = _bytes_of(None, device), [0] * process_group.size()
    if result is not None and mine is not None:
        job = jobs[mine]
        sent, sizes = _bytes_of(result.to(job.piece.dtype).movedim(job.cut.dim, 0), device), _nbytes_of_pieces(job)
    expected = [0 if index is None else jobs[index].piece.nbytes for index in owners]
    received = torch.empty(sum(expected), dtype=torch.uint8, device=device)
    return dist.all_to_all_single(received, sent, expected, sizes, process_group, async_op=True), received


def _nbytes_of_pieces(job: Job) -> list[int]:
    return [job.cut.piece_numel(job.shape, rank) * job.piece.element_size() for rank in range(len(job.cut.sizes))]


def _bytes_of(tensor: Tensor | None, device: torch.device) -> Tensor:
    """``tensor`` as bytes, because backends differ in the dtypes that they know."""
    if tensor is None or tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return tensor.contiguous().view(-1).view(torch.uint8)


def _assembled(received: Tensor, job: Job) -> Tensor:
    """Pieces rank by rank are the rows of ``cut.dim`` in order."""
    shape = [job.shape[job.cut.dim], *(size for dim, size in enumerate(job.shape) if dim != job.cut.dim)]
    return received.view(job.piece.dtype).view(shape).movedim(0, job.cut.dim)
