"""Bands of tensors on their way from the ranks that keep them to the ranks that write them, with bounded memory.

In each step every writer gets one band: the ranks that keep parts of it send these, and the writer lays them side by side. It refuses
to know files.

Worked example, 2 ranks, rank 0 writes, an (8, 4) parameter under Shard(1), bands of 4 rows: in the first step rank 1 sends its
(4, 2) of rows [0, 4), rank 0 puts it right of its own; in the second the same with rows [4, 8).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core import torch_compat as compat
from .boxes import Box, Piece, pieces_of
from .model_tensors import ModelTensor, cuts_of
from .save_plan import Band, PlannedTensor

Receive = Callable[[Band, Tensor], None]


class BandStream:
    """Brings bands to their writers.

    Memory: a writer has one band and what it receives of it; a sender what it keeps of the bands of one step
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group
        self._me = 0 if process_group is None else dist.get_rank()
        self._keepers: dict[int, tuple[PlannedTensor, list[tuple[int, list[Piece]]]]] = {}

    def run(self, bands_of_writers: Mapping[int, Iterable[Band]], receive: Receive) -> None:
        """Call ``receive`` with every band of this rank and its whole value (CPU, contiguous), in order.

        bands_of_writers: for each writer (global rank) its bands; the same on all ranks
        Collective:       yes, over the process group
        """
        writers = list(bands_of_writers)
        for step in itertools.zip_longest(*bands_of_writers.values()):
            self._step([(writer, band) for writer, band in zip(writers, step, strict=True) if band is not None], receive)

    def _step(self, bands: Sequence[tuple[int, Band]], receive: Receive) -> None:
        operations: list[dist.P2POp] = []
        mine: Band | None = None
        parts: list[tuple[Box, Tensor]] = []  # of my band: where, and what will be there
        for writer, band in bands:
            if writer == self._me:
                mine = band
            for keeper, piece, common in self._parts_of(band, writer):
                if keeper == self._me:
                    part = _own_part(band.tensor, piece, common)
                    if writer == self._me:
                        parts.append((common, part))
                    else:
                        part = part.to(_wire_device(band.tensor.source)).contiguous()
                        operations.append(dist.P2POp(dist.isend, part.view(-1).view(torch.uint8), writer, self._group))
                elif writer == self._me:
                    part = torch.empty(common.shape, dtype=band.tensor.dtype, device=_wire_device(band.tensor.source))
                    parts.append((common, part))
                    operations.append(dist.P2POp(dist.irecv, part.view(-1).view(torch.uint8), keeper, self._group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if mine is not None:
            receive(mine, _assembled(mine, parts))

    def _parts_of(self, band: Band, writer: int) -> Iterator[tuple[int, Piece, Box]]:
        """Who sends which part of ``band``: a rank, the piece that it keeps, and what of the band is in it."""
        known = self._keepers.get(writer)
        if known is None or known[0] is not band.tensor:
            known = self._keepers[writer] = (band.tensor, keepers_of(band.tensor.source, writer))
        for rank, pieces in known[1]:
            for piece in pieces:
                common = piece.box.intersect(band.box)
                if common.numel > 0:
                    yield rank, piece, common


def keepers_of(source: ModelTensor, writer: int) -> list[tuple[int, list[Piece]]]:
    """Ranks that together keep every element of a tensor once, and their pieces; of replicas the writer's own, if it has one."""
    tensor = source.tensor
    if not isinstance(tensor, DTensor):
        return [(writer, pieces_of(tensor.shape, ()))]
    mesh = tensor.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    coordinates = itertools.product(*map(range, mesh.shape))
    replicas: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        shard = tuple(index for index, each in zip(coordinate, tensor.placements, strict=True) if not each.is_replicate())
        replicas.setdefault(shard, []).append((rank, coordinate))
    keepers = []
    for candidates in replicas.values():
        rank, coordinate = next((each for each in candidates if each[0] == writer), candidates[writer % len(candidates)])
        keepers.append((rank, pieces_of(tensor.shape, cuts_of(tensor, coordinate))))
    return keepers


def _own_part(tensor: PlannedTensor, piece: Piece, common: Box) -> Tensor:
    origin = tuple(start - at for start, at in zip(piece.box.start, piece.at, strict=True))
    return tensor.source.local[common.seen_from(origin).slices].to(tensor.dtype)


def _wire_device(source: ModelTensor) -> torch.device:
    """Where parts must be to be sent: on the mesh's device, even if they are kept on the host."""
    tensor = source.tensor
    kind = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
    return torch.device(kind) if kind == "cpu" else torch.device(kind, compat.device_module(kind).current_device())


def _assembled(band: Band, parts: Sequence[tuple[Box, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][1].cpu().contiguous()
    whole = torch.empty(band.box.shape, dtype=band.tensor.dtype)
    assert sum(math.prod(part.shape) for _, part in parts) == whole.numel(), f"the shards of {band.tensor.key} do not add up"
    for box, part in parts:
        whole[box.seen_from(band.box.start).slices].copy_(part)
    return whole
