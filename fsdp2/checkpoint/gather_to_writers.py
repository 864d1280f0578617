"""Sends tensors in bands from the ranks that keep them to the ranks that write them, with bounded memory.

In each step every writer gets some bands: the ranks that keep parts of them send these, and the writer assembles them.
Before a rank sends anything, all ranks agree that each is ready: an error on one rank, while sending or in a writer,
ends the stream on every rank.

Worked example, 2 ranks, rank 0 writes, an (8, 4) parameter under Shard(1), bands of 4 rows: in the first step rank 1 sends its
(4, 2) of rows [0, 4), rank 0 puts it right of its own; in the second the same with rows [4, 8).

Note: first collective of a group. NCCL creates a group's communicator in its first collective, in which all of its
ranks must take part; point-to-point operations among some ranks are not one. The agreement before them is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.comm.agreement import reached
from ..core.plan.mesh import device_of
from ..errors import FSDPError
from .failures import tried
from .model_tensors import ModelTensor, cuts_of, wanted
from .safetensors_plan import Band, PlannedTensor
from .shard_geometry import Box, Piece, pieces_of

Receive = Callable[[Band, Tensor], None]
Ready = Callable[[FSDPError | None], None]
"""All ranks of a stream continue, or raise if one has a problem. Collective: yes, over them"""

MAX_BANDS = 64
"""How many bands a writer takes per step: with more, the operations cost more than the agreements they save."""


class BandStream:
    """Sends bands to their writers.

    process_group: whose ranks send to each other
    ready:         over all ranks that call ``run``; if these are not all of ``process_group``, ranks communicate in
                   pairs
    step_nbytes:   of a writer's bands in one step; a larger band gets its own step

    Memory: a writer holds the bands of one step and the parts that it receives; a sender its parts of that step's bands
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, ready: Ready, step_nbytes: int, *, what: str, everybody: bool = True
    ) -> None:
        self._group = process_group
        self._ready = ready
        self._step_nbytes = step_nbytes
        self._what = what
        self._everybody = everybody
        self._me = 0 if process_group is None else dist.get_rank()
        self._keepers: dict[int, tuple[PlannedTensor, dict[int, list[tuple[int, list[Piece]]]]]] = {}

    def run(self, bands_of_writers: Mapping[int, Iterable[Band]], receive: Receive, problem: FSDPError | None = None) -> None:
        """Call ``receive`` with every band of this rank and its whole value (CPU, contiguous), in order.

        bands_of_writers: for each writer (global rank) its bands; the same on all ranks
        problem:          of this rank, if it has one already
        Collective:       yes, over the ranks of ``ready``
        Raises:           on every rank, the error of one: ``problem``, or one in preparing a step or in ``receive``
        """
        steps = self._steps(bands_of_writers)
        while True:
            prepared: list[_Step | None] = []
            if problem is None:
                prepared, problem = tried(self._what, lambda: self._prepared(next(steps, None)))
            self._ready(problem)
            step = prepared.pop()
            if step is None:
                return
            if step.operations:
                with reached(self._group):
                    self._communicate(step.operations)
            _, problem = tried(self._what, lambda step=step: step.hand_out(receive))  # type: ignore[misc]
            del step  # before the next one is prepared

    def _steps(self, bands_of_writers: Mapping[int, Iterable[Band]]) -> Iterator[list[tuple[int, Band]]]:
        writers = list(bands_of_writers)
        for step in itertools.zip_longest(*(self._together(bands) for bands in bands_of_writers.values()), fillvalue=()):
            yield [(writer, band) for writer, bands in zip(writers, step, strict=True) for band in bands]

    def _together(self, bands: Iterable[Band]) -> Iterator[list[Band]]:
        """Small bands in groups, in order."""
        step: list[Band] = []
        filled = 0
        for band in bands:
            if step and (filled + band.nbytes > self._step_nbytes or len(step) == MAX_BANDS):
                yield step
                step, filled = [], 0
            step.append(band)
            filled += band.nbytes
        if step:
            yield step

    def _prepared(self, bands: list[tuple[int, Band]] | None) -> _Step | None:
        """Everything in a step that may fail before its ranks communicate."""
        if bands is None:
            return None
        step = _Step()
        for writer, band in bands:
            value = torch.empty(band.box.shape, dtype=band.tensor.dtype, device="cpu" if writer == self._me else "meta")
            if writer == self._me:
                step.mine.append((band, value))
            for keeper, part in self._parts_of(band, value, writer):
                if keeper == self._me and writer == self._me:
                    part.place.copy_(part.local)
                elif keeper == self._me:
                    sent = part.local.to(_wire_device(part.source), band.tensor.dtype).contiguous()
                    step.operations.append(dist.P2POp(dist.isend, _flat_bytes(sent), writer, self._group))
                elif writer == self._me:
                    device = _wire_device(part.source)
                    received = part.place
                    if device.type != "cpu" or not received.is_contiguous():
                        received = torch.empty(part.box.shape, dtype=band.tensor.dtype, device=device)
                        step.arriving.append((received, part.place))
                    step.operations.append(dist.P2POp(dist.irecv, _flat_bytes(received), keeper, self._group))
        return step

    def _communicate(self, operations: list[dist.P2POp]) -> None:
        if self._everybody:
            by_device: dict[torch.device, list[dist.P2POp]] = {}  # of a batch, torch waits for what its first operation's backend sends
            for each in operations:
                by_device.setdefault(each.tensor.device, []).append(each)
            works = [work for batch in by_device.values() for work in dist.batch_isend_irecv(batch)]
        else:  # see Note: first collective of a group; alone, each operation has a communicator of its two ranks
            works = [each.op(each.tensor, each.peer, each.group) for each in operations]
        for work in works:
            work.wait()

    def _parts_of(self, band: Band, value: Tensor, writer: int) -> Iterator[tuple[int, _Part]]:
        """The parts that together are ``band``, with the rank that sends each and its place in ``value``."""
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
        """``keepers_of``, cached for the current tensor of ``writer``."""
        known = self._keepers.get(writer)
        if known is None or known[0] is not tensor:
            known = self._keepers[writer] = (tensor, {})
        if id(source) not in known[1]:
            known[1][id(source)] = keepers_of(source, writer)
        return known[1][id(source)]


@dataclass
class _Step:
    """This rank's work in a step.

    mine:     its bands, and the tensors that they are joined in
    arriving: the parts to copy when they have arrived, and their targets
    """

    operations: list[dist.P2POp] = field(default_factory=list)
    mine: list[tuple[Band, Tensor]] = field(default_factory=list)
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def hand_out(self, receive: Receive) -> None:
        for received, place in self.arriving:
            place.copy_(received)
        for band, value in self.mine:
            receive(band, value)


@dataclass(frozen=True)
class _Part:
    """``box`` of a parameter, to be sent from ``piece``, which some rank keeps, to ``place`` in a band."""

    source: ModelTensor
    piece: Piece
    box: Box
    place: Tensor

    @property
    def local(self) -> Tensor:
        """The part itself, on the rank that keeps the piece."""
        origin = tuple(start - at for start, at in zip(self.piece.box.start, self.piece.at, strict=True))
        return self.source.local[self.box.seen_from(origin).slices]


def keepers_of(source: ModelTensor, writer: int) -> list[tuple[int, list[Piece]]]:
    """Ranks that together keep every element of a tensor once, and their pieces; preferably the writer's replica."""
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
    """The device from which parts are sent: the mesh's, even if the host keeps them."""
    tensor = source.tensor
    return device_of(tensor.device_mesh) if isinstance(tensor, DTensor) else torch.device("cpu")


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor; ``view(-1)`` would keep the stride of a single element, which need not be 1."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
