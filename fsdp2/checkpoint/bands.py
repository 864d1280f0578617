"""Bands of tensors on their way from the ranks that keep them to the ranks that write them, with bounded memory.

In each step every writer gets one band: the ranks that keep parts of it send these, and the writer lays them side by side. It refuses
to know files.

Worked example, 2 ranks, rank 0 writes, an (8, 4) parameter under Shard(1), bands of 4 rows: in the first step rank 1 sends its
(4, 2) of rows [0, 4), rank 0 puts it right of its own; in the second the same with rows [4, 8).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core import torch_compat as compat
from .boxes import Box, Piece, pieces_of
from .kept import wanted
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
        self._keepers: dict[int, tuple[PlannedTensor, dict[int, list[tuple[int, list[Piece]]]]]] = {}

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
        mine: tuple[Band, Tensor] | None = None
        arriving: list[tuple[Tensor, Tensor]] = []  # what to copy when it is there, and where to
        for writer, band in bands:
            value = torch.empty(band.box.shape, dtype=band.tensor.dtype, device="cpu" if writer == self._me else "meta")
            if writer == self._me:
                mine = band, value
            for keeper, part in self._parts_of(band, value, writer):
                if keeper == self._me and writer == self._me:
                    part.place.copy_(part.local)
                elif keeper == self._me:
                    sent = part.local.to(_wire_device(part.source), band.tensor.dtype).contiguous()
                    operations.append(dist.P2POp(dist.isend, _flat_bytes(sent), writer, self._group))
                elif writer == self._me:
                    device = _wire_device(part.source)
                    received = part.place
                    if device.type != "cpu" or not received.is_contiguous():
                        received = torch.empty(part.box.shape, dtype=band.tensor.dtype, device=device)
                        arriving.append((received, part.place))
                    operations.append(dist.P2POp(dist.irecv, _flat_bytes(received), keeper, self._group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for received, place in arriving:
            place.copy_(received)
        if mine is not None:
            receive(*mine)

    def _parts_of(self, band: Band, value: Tensor, writer: int) -> Iterator[tuple[int, _Part]]:
        """Who brings which part of ``band``, and where in ``value`` it belongs; together they are all of it."""
        numel = 0
        for source, box, out in wanted(band.tensor.lazy, band.box, value):
            for rank, pieces in self._keepers_of(source, band.tensor, writer):
                for piece in pieces:
                    common = piece.box.intersect(box)
                    if common.numel > 0:
                        numel += common.numel
                        yield rank, _Part(source, piece, common, out[common.seen_from(box.start).slices])
        assert numel == band.box.numel, f"the shards of {band.tensor.key} do not add up"

    def _keepers_of(self, source: ModelTensor, tensor: PlannedTensor, writer: int) -> list[tuple[int, list[Piece]]]:
        """Remembered for the tensor that ``writer`` is at."""
        known = self._keepers.get(writer)
        if known is None or known[0] is not tensor:
            known = self._keepers[writer] = (tensor, {})
        if id(source) not in known[1]:
            known[1][id(source)] = keepers_of(source, writer)
        return known[1][id(source)]


@dataclass(frozen=True)
class _Part:
    """``box`` of a parameter, on its way from ``piece``, which some rank keeps, to ``place`` in a band."""

    source: ModelTensor
    piece: Piece
    box: Box
    place: Tensor

    @property
    def local(self) -> Tensor:
        """On the rank that keeps the piece."""
        origin = tuple(start - at for start, at in zip(self.piece.box.start, self.piece.at, strict=True))
        return self.source.local[self.box.seen_from(origin).slices]


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


def _wire_device(source: ModelTensor) -> torch.device:
    """Where parts must be to be sent: on the mesh's device, even if they are kept on the host."""
    tensor = source.tensor
    kind = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
    return torch.device(kind) if kind == "cpu" else torch.device(kind, compat.device_module(kind).current_device())


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor; ``view(-1)`` would keep the stride of a single element, which need not be 1."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
