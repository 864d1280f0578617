"""Brings the tensors of one unit together: one all-gather for each mesh axis that cuts some of them, the innermost axis first.

Until the end everything is bytes: every rank joins its shards, each in the dtype in which it is sent, and pads them to the length of
the longest. One copy then puts the shards that arrived in the order in which they lie in their tensors.

Worked example, bf16, (3, 2) and (4,) over 2 ranks: rank 0 sends 2 rows and 2 elements, 12 bytes; rank 1 sends 1 row and 2 elements,
8 bytes. Both gather 2 * 16 bytes, as lengths are multiples of 16, and join them to 20: rows 0, 1, 2, elements 0 to 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..checkpoint.model_tensors import ModelTensor, cuts_of
from ..checkpoint.shard_geometry import Piece, local_shape_of, pieces_of
from ..core.comm.agreement import reached
from ..core.comm.collective_log import during
from ..core.plan.mesh import device_of
from ..errors import ParameterError
from ..torch_names import torch_collectives
from .adapters import Merge

Coordinate = tuple[int, ...]
_ALIGNED = 16


@dataclass(eq=False)
class Part:
    """A tensor, and how its shards lie in it.

    dtype:    in which it is sent
    held:     the coordinates of the ranks whose shards are here at the end, in the order in which they arrive
    in_order: for shards that are whole rows: their order in the tensor; None: they are copied piece by piece
    merges:   adapters to add to it before it is sent
    """

    source: ModelTensor
    dtype: torch.dtype
    merges: Sequence[Merge] = ()
    shape: tuple[int, ...] = ()
    local_shape: tuple[int, ...] = ()
    held: list[Coordinate] = field(default_factory=lambda: [()])
    in_order: list[int] | None = None

    def __post_init__(self) -> None:
        tensor = self.source.tensor
        self.shape, self.local_shape = tuple(tensor.shape), tuple(self.source.local.shape)
        if isinstance(tensor, DTensor):
            self.held = [tuple(tensor.device_mesh.get_coordinate() or ())]
        self.own_pieces = self.pieces_at(self.held[0]) if self.merges else []

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def shape_at(self, coordinate: Coordinate) -> tuple[int, ...]:
        tensor = self.source.tensor
        return local_shape_of(self.shape, cuts_of(tensor, coordinate)) if isinstance(tensor, DTensor) else self.shape

    def pieces_at(self, coordinate: Coordinate) -> list[Piece]:
        tensor = self.source.tensor
        return pieces_of(self.shape, cuts_of(tensor, coordinate) if isinstance(tensor, DTensor) else ())

    def cut_by(self, axis: int) -> bool:
        tensor = self.source.tensor
        return isinstance(tensor, DTensor) and not tensor.placements[axis].is_replicate()

    def find_order(self) -> None:
        """``in_order``, once ``held`` is complete."""
        pieces = [self.pieces_at(coordinate) for coordinate in self.held]
        if all(len(each) <= 1 and all(piece.box.shape[1:] == self.shape[1:] for piece in each) for each in pieces):
            kept = [index for index, each in enumerate(pieces) if each]
            self.in_order = sorted(kept, key=lambda index: pieces[index][0].box.start)

    def as_bytes(self, device: torch.device, factors: Mapping[ModelTensor, Tensor]) -> Tensor:
        local = self.source.local
        if tuple(local.shape) != self.local_shape:
            raise ParameterError(
                f"{self.source.name} has a shard of shape {tuple(local.shape)} now",
                expected=f"{self.local_shape}, as when fsdp2.publish looked at the model",
                fix="call fsdp2.publish again after the model has been sharded in another way",
            )
        if self.merges:
            local = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
            for merge in self.merges:
                merge.add(local, self.own_pieces, factors)
        return local.reshape(-1).to(device, self.dtype).contiguous().view(torch.uint8)


@dataclass(eq=False)
class _Step:
    """One all-gather.

    parts:  by number, those that it brings together, and how many shards of each a rank sends
    sizes:  for each rank of ``group``, the bytes of each shard that it sends, and of the padding at the end
    """

    group: dist.ProcessGroup
    parts: dict[int, int]
    sizes: list[list[int]]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes[0])


class UnitGather:
    """How the tensors of one unit that lie on one mesh are gathered; decided once, the same on all ranks.

    mesh: None for plain tensors, which every rank has whole
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device, parts: Sequence[Part]) -> None:
        self.parts = sorted(parts, key=lambda part: -part.dtype.itemsize)  # each then begins at a multiple of its itemsize
        self.device = device if mesh is None else device_of(mesh)
        self.steps: list[_Step] = []
        for axis in reversed(range(0 if mesh is None else mesh.ndim)):
            assert mesh is not None
            cut = [index for index, part in enumerate(self.parts) if part.cut_by(axis)]
            if cut and mesh.size(axis) > 1:
                self.steps.append(self._step(mesh, axis, {index: len(self.parts[index].held) for index in cut}))
        for part in self.parts:
            part.find_order()

    def _step(self, mesh: DeviceMesh, axis: int, cut: dict[int, int]) -> _Step:
        sizes: list[list[int]] = [[] for _ in range(mesh.size(axis))]
        for index in cut:
            part = self.parts[index]
            before, part.held = part.held, []
            for rank, sent in enumerate(sizes):
                for coordinate in before:
                    part.held.append((*coordinate[:axis], rank, *coordinate[axis + 1 :]))
                    sent.append(math.prod(part.shape_at(part.held[-1])) * part.dtype.itemsize)
        nbytes = -(-max(map(sum, sizes)) // _ALIGNED) * _ALIGNED
        return _Step(mesh.get_group(axis), cut, [[*sent, nbytes - sum(sent)] for sent in sizes])

    def begin(self, factors: Mapping[ModelTensor, Tensor]) -> Gathering:
        """This rank's shards, ready to be sent. factors: of adapters to merge. Collective: no"""
        return Gathering(self, factors)


class Gathering:
    """One time that a ``UnitGather`` runs: ``issue`` begins its first collective, ``finish`` ends the last one, ``whole`` joins."""

    def __init__(self, plan: UnitGather, factors: Mapping[ModelTensor, Tensor]) -> None:
        self._plan = plan
        self._shards = [[part.as_bytes(plan.device, factors)] for part in plan.parts]
        self._sent = self._packed(plan.steps[0]) if plan.steps else None
        self._under_way: tuple[Tensor, dist.Work | None] | None = None

    def _packed(self, step: _Step) -> Tensor:
        own = [shard for index in step.parts for shard in self._shards[index]]
        padding = torch.empty(step.nbytes - sum(map(len, own)), dtype=torch.uint8, device=self._plan.device)
        packed = torch.cat([*own, padding])
        for index in step.parts:
            self._shards[index] = []
        return packed

    def issue(self) -> Gathering:
        """Collective: yes, its first one"""
        if self._sent is not None:
            self._begin(self._plan.steps[0])
        return self

    def _begin(self, step: _Step) -> None:
        assert self._sent is not None
        gathered = torch.empty(len(step.sizes) * step.nbytes, dtype=torch.uint8, device=self._plan.device)
        with reached(step.group):
            self._under_way = gathered, torch_collectives.all_gather_single(gathered, self._sent, step.group, True)

    def finish(self) -> Gathering:
        """Collective: yes, of all but the first one"""
        for number, step in enumerate(self._plan.steps):
            if number > 0:
                self._sent = self._packed(step)
                self._begin(step)
            assert self._under_way is not None
            gathered, work = self._under_way
            with reached(step.group), during("all-gather of publish", step.group, gathered):
                if work is not None:
                    work.wait()
            self._sent = self._under_way = None
            for sizes, arrived in zip(step.sizes, gathered.view(len(step.sizes), step.nbytes), strict=True):
                shards = iter(arrived.split_with_sizes(sizes))
                for index, num_sent in step.parts.items():
                    self._shards[index] += itertools.islice(shards, num_sent)
        return self

    def whole(self) -> dict[ModelTensor, Tensor]:
        """The whole tensors, views of one buffer, or of two if some are cut in other dims than the first. For one call"""
        shards, self._shards = self._shards, []
        whole: dict[ModelTensor, Tensor] = {}
        chosen = list(zip(self._plan.parts, shards, strict=True))
        in_order = [(part, held) for part, held in chosen if part.in_order is not None]
        if in_order:
            joined = torch.cat([held[index] for part, held in in_order for index in part.in_order or ()])
            for (part, _), view in zip(in_order, joined.split_with_sizes([part.nbytes for part, _ in in_order]), strict=True):
                whole[part.source] = view.view(part.dtype).view(part.shape)
        others = [(part, held) for part, held in chosen if part.in_order is None]
        if others:
            buffer = torch.empty(sum(part.nbytes for part, _ in others), dtype=torch.uint8, device=self._plan.device)
            for (part, held), view in zip(others, buffer.split_with_sizes([part.nbytes for part, _ in others]), strict=True):
                tensor = whole[part.source] = view.view(part.dtype).view(part.shape)
                for coordinate, shard in zip(part.held, held, strict=True):
                    local = shard.view(part.dtype).view(part.shape_at(coordinate))
                    for piece in part.pieces_at(coordinate):
                        tensor[piece.box.slices] = local[piece.local.slices]
        return whole
