"""One all-gather of parameters with memory of their own: each tensor that an extension sends gets a storage.

This file lays out the tensors to send and owns the memory of the gathered ones; ``extensions.py`` calls the extensions.

Worked example, a (5, 4) weight over 2 ranks that sends rows of int8 and one scale per row:

    shards       rows [0, 3) and [3, 5)
    to send      (3, 4) int8 and (3,) fp32, 24 bytes per rank, one collective; rank 1 pads its (2, 4) and (2,) to that
    gathered     (5, 4) int8 and (5,) fp32, views of storages with room for 6 rows
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...policy import AllGather
from ...torch_names import torch_tensors
from ..comm import backends, collectives
from ..comm.streams import Stream
from ..plan.layout import Cut
from .all_gather import ALIGN_NBYTES, Gathering
from .extensions import Extensions, releases_gathered, require_same_kinds
from .group_plan import GroupPlan, direct_from_nbytes
from .param import new_unsharded_param, storage_view
from .rank_pieces import assemble

Storages = list[tuple[torch.UntypedStorage, int]]
"""Storages, and their sizes when they are allocated."""


@dataclass(frozen=True)
class _Sent:
    """What one parameter sends in one gather.

    shapes, dtypes: of the tensors, padded to the same on all ranks
    metadata:       from ``fsdp_pre_all_gather``, for ``fsdp_post_all_gather``
    """

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    metadata: Any


@dataclass(frozen=True)
class _Place:
    """Where one of the tensors that are sent arrives.

    output:     1-D, with padding
    rows:       the same storage as bytes, (W, n), with a version counter of its own
    gap:        the storage's end, (W, n), which takes the padding after each payload; None: there is none
    is_stacked: the rows are the whole tensor, one after another; else it is put together after they have arrived
    is_direct:  gathered straight into ``output``, from the second gather on
    """

    output: Tensor
    rows: Tensor
    gap: Tensor | None
    is_stacked: bool
    is_direct: bool = False


@dataclass(frozen=True)
class _Made:
    """What the first gather makes.

    places:   one for each tensor that is sent
    kept:     for each parameter, the tensors that fsdp_post_all_gather asks to free
    storages: of places and kept tensors; ``direct`` has those that are gathered straight into
    released: those that are freed as soon as the unsharded parameters are made
    """

    places: list[_Place]
    kept: list[tuple[Tensor, ...]]
    storages: Storages
    direct: Storages
    released: list[torch.UntypedStorage]


class ExtensionGather:
    """All-gathers parameters with memory of their own; reusable, one use at a time.

    coalesces_over, packs: see ``Sender``

    The first gather packs all tensors into one buffer. Where the collective may share a launch, later gathers send
    large tensors straight into the outputs of the first.

    Note: extensions and streams. ``start`` allocates on the gather stream; ``fill`` and (metadata) the user's
    operations read that memory on compute. ``fill`` orders the gather stream after those reads, so no later gather
    writes memory that the host has freed while compute still reads it. ``start`` cannot do that where a gather runs
    alongside the loss. With ``copy``, tensors are packed on the stream that is compute at ``start``, perhaps a side
    stream of the user's, which ``fill`` orders in the same way.
    """

    def __init__(self, plan: GroupPlan, comm: AllGather | None) -> None:
        """comm: a custom communicator, if there are several ranks"""
        mesh, options = plan.mesh, plan.options
        self._backend = backends.backend_of(mesh.shard_group, plan.device.type)
        is_ordered = backends.is_stream_ordered(self._backend)
        self._may_go_direct = comm is None and options.all_gather in (None, "stock") and is_ordered
        self.packs = comm is None and options.all_gather is None and not is_ordered
        self.coalesces_over = mesh.shard_group if self._may_go_direct or self.packs else None
        self._plan = plan
        self._comm = comm
        self._extensions = Extensions(mesh, plan.device, plan.param_dtype, options.mp_policy)
        # The least size, of all ranks together, of a tensor that is gathered straight into its output.
        self._direct_from_nbytes = {"direct": 1, "packed": math.inf}.get(
            options.gather, direct_from_nbytes(mesh.shard_size)
        )
        self._kinds: list[tuple[list[torch.Size], list[torch.dtype]]] = []  # of what was sent before
        self._made: _Made | None = None
        self._allocated_on: tuple[Stream, ...] = ()  # the compute streams on which the unsharded memory was allocated
        self._packed_on: set[Stream] = set()  # the compute streams that allocated buffers and metadata, in any gather

    # --- start ---

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, flat: Tensor | None, copy: bool, together: list[Gathering] | None = None) -> Gathering:
        """Ask the parameters what to send and issue the collective. See ``Gather.start``; there is no flat shard here.

        Collective: yes, over the shard axis; an extension may communicate over it as well.
        """
        streams = self._plan.streams
        self._allocated_on = ()
        if self._made is not None:
            self._allocate(self._made.direct)
        if self.coalesces_over is None:
            together = None
        gathering = Gathering(streams, streams.compute, self)  # whose ``packed`` is 1-D
        own_row_only = together is not None and self.packs
        if copy:  # on compute, where the user's writes are
            self._pack(gathering, False, own_row_only)
            self._packed_on.add(streams.compute)
        streams.order(streams.gather, streams.mark(streams.compute))
        with streams.on(streams.gather):
            if not copy:
                self._pack(gathering, True, own_row_only)
            if together is not None:
                together.append(gathering)
            else:
                self._send(gathering, copy)
                gathering.note_sent()
        return gathering

    def payload(self, gathering: Gathering) -> Tensor:
        assert gathering.packed is not None
        gathering.held, gathering.packed = gathering.packed, None
        return gathering.held

    def to_send(self, gathering: Gathering) -> tuple[list[Tensor], list[Tensor]]:
        """Each input is this rank's own row of an output."""
        mesh, packed = self._plan.mesh, gathering.packed
        direct = [] if self._made is None else [place.rows for place in self._made.places if place.is_direct]
        outputs, inputs = [rows.view(-1) for rows in direct], [rows[mesh.shard_rank] for rows in direct]
        if packed is not None:
            numel = packed.numel() // mesh.shard_size
            outputs.insert(0, packed)
            inputs.insert(0, packed.narrow(0, numel * mesh.shard_rank, numel))
        return outputs, inputs

    def _send(self, gathering: Gathering, async_op: bool) -> None:
        """async_op: whether the user asked for an asynchronous unshard; only custom communicators learn of it."""
        plan, process_group = self._plan, self._plan.mesh.shard_group
        if process_group is None:
            return
        outputs, inputs = self.to_send(gathering)
        if self._comm is not None:
            work = self._comm(output_tensor=outputs[0], input_tensor=inputs[0], group=process_group, async_op=async_op)
            gathering.pending = collectives.Works([work])
            return
        algorithm = plan.options.all_gather or backends.choose_all_gather(
            self._backend, plan.mesh.shard_size, outputs[0].nbytes, plan.device.type
        )
        is_async = not backends.is_stream_ordered(self._backend)
        gathering.pending = collectives.all_gather(outputs, inputs, process_group, algorithm, is_async)

    def copy_out(self, gathering: Gathering) -> None:
        pass  # ``fill`` does, on compute

    def _pack(self, gathering: Gathering, non_blocking: bool, own_row_only: bool) -> None:
        """Copy the tensors of every parameter into this rank's row of its output, if it is direct, or of a buffer.

        own_row_only: the buffer has no rows for other ranks
        """
        plan, made = self._plan, self._made
        pieces: list[Tensor] = []
        sent: list[_Sent] = []
        gathering.sent = sent
        for param in plan.params:
            tensors, metadata = self._extensions.to_send(param, non_blocking)
            pieces += tensors
            sent.append(_Sent([each.shape for each in tensors], [each.dtype for each in tensors], metadata))
        kinds = [(each.shapes, each.dtypes) for each in sent]
        if self._kinds:
            require_same_kinds(plan.params, self._kinds, kinds)
        self._kinds = kinds
        if made is not None and made.direct:
            straight = [(place, piece) for place, piece in zip(made.places, pieces, strict=True) if place.is_direct]
            torch._foreach_copy_(
                [place.rows[plan.mesh.shard_rank] for place, _ in straight],
                [piece.reshape(-1).view(torch.uint8) for _, piece in straight],
            )
            pieces = [piece for place, piece in zip(made.places, pieces, strict=True) if not place.is_direct]
        if pieces:
            gathering.packed = self._packed(pieces, own_row_only)

    def _packed(self, pieces: Sequence[Tensor], own_row_only: bool) -> Tensor:
        plan, mesh = self._plan, self._plan.mesh
        dtypes = {piece.dtype for piece in pieces}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        rows = [piece.reshape(-1) for piece in pieces]
        if dtype is torch.uint8:
            rows = [row.view(torch.uint8) for row in rows]
        sizes = []
        for row in rows:
            sizes += [row.numel(), self._gap_nbytes(row.nbytes) // dtype.itemsize]
        numel = sum(sizes)
        allocate = torch.empty if self._comm is None else self._comm.allocate
        num_rows, own_row = (1, 0) if own_row_only else (mesh.shard_size, mesh.shard_rank)
        packed: Tensor = allocate((numel * num_rows,), dtype=dtype, device=plan.device)
        own = packed.narrow(0, numel * own_row, numel)
        torch._foreach_copy_(list(torch.split(own, sizes)[::2]), rows)
        return packed

    # --- finish ---

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self, gathering: Gathering) -> None:
        """Give the unsharded parameters the values of a finished gather.

        If an extension raises, or memory runs out, ``free`` follows.
        """
        try:
            self._fill(gathering.packed, gathering.sent)
        except BaseException:
            if self._made is None:  # the next gather makes them all
                for param in self._plan.params:
                    param.unsharded = None
            raise
        finally:
            self.let_go()

    def _fill(self, packed: Tensor | None, sent: list[_Sent]) -> None:
        plan, made, streams = self._plan, self._made, self._plan.streams
        if made is None:
            places = self._make_places(sent)
            self._allocated_on = (streams.compute,)
        else:
            places = made.places
            self._allocate(made.storages)
        arrived = [place.rows if place.is_stacked else torch.empty_like(place.rows) for place in places]
        if packed is not None:
            outs = []
            for place, rows in zip(places, arrived, strict=True):
                if not place.is_direct:
                    outs += [rows] if place.gap is None else [rows, place.gap]
            sizes = [out.shape[1] for out in outs]
            received = packed.view(plan.mesh.shard_size, packed.numel() // plan.mesh.shard_size).view(torch.uint8)
            torch.split_with_sizes_copy(received, sizes, dim=1, out=outs)
        left = iter(zip(places, arrived, strict=True))
        kept = []
        for index, (param, each) in enumerate(zip(plan.params, sent, strict=True)):
            own = zip(each.shapes, left, strict=False)
            gathered = tuple(_put_together(rows, place.output, shape, param.spec.cut) for shape, (place, rows) in own)
            if made is None:
                whole, to_free = self._extensions.make_unsharded(param, gathered, each.metadata)
                kept.append(to_free)
                param.unsharded = new_unsharded_param(param, param.spec.to_logical(whole))
            else:
                self._extensions.refill_unsharded(param, gathered, each.metadata, made.kept[index])
        if made is None:
            self._made = made = self._keep(places, kept, sent)
        for storage in made.released:
            streams.resize(storage, 0)

    def let_go(self) -> None:
        """What was gathered is dropped: no later gather may write its memory before compute has read it."""
        streams = self._plan.streams
        streams.order(streams.gather, streams.mark(streams.compute))
        for stream in self._packed_on:
            if stream != streams.compute:
                streams.order(stream, streams.mark(streams.compute))

    def _allocate(self, storages: Storages) -> None:
        """Allocate the storages that have no memory, on compute."""
        streams = self._plan.streams
        for storage, nbytes in storages:
            if storage.nbytes() != nbytes:
                streams.resize(storage, nbytes)
        if streams.compute not in self._allocated_on:
            self._allocated_on = (*self._allocated_on, streams.compute)

    def _gap_nbytes(self, nbytes: int) -> int:
        """Bytes of padding that align the next payload: none for a custom communicator, by upstream's contract."""
        return 0 if self._comm is not None else -nbytes % ALIGN_NBYTES

    def _make_places(self, sent: Sequence[_Sent]) -> list[_Place]:
        plan, num_shards = self._plan, self._plan.mesh.shard_size
        raw = torch.empty(0, dtype=torch.uint8, device=plan.device)
        places = []
        for param, each in zip(plan.params, sent, strict=True):
            for shape, dtype in zip(each.shapes, each.dtypes, strict=True):
                nbytes = shape.numel() * dtype.itemsize
                gap = self._gap_nbytes(nbytes)
                storage = torch.empty(
                    num_shards * (nbytes + gap), dtype=torch.uint8, device=plan.device
                ).untyped_storage()
                like = torch.empty(0, dtype=dtype, device=plan.device)
                output = storage_view(storage, like, 0, (num_shards * shape.numel(),))
                rows = storage_view(storage, raw, 0, (num_shards, nbytes))
                after = storage_view(storage, raw, num_shards * nbytes, (num_shards, gap)) if gap > 0 else None
                places.append(_Place(output, rows, after, param.spec.cut.is_stacked))
        return places

    def _keep(self, places: list[_Place], kept: list[tuple[Tensor, ...]], sent: Sequence[_Sent]) -> _Made:
        """Keep the results of the first gather; from now on, large stacked tensors are gathered straight into place."""
        plan = self._plan
        made = [*(place.output for place in places), *(tensor for tensors in kept for tensor in tensors)]
        storages = {torch_tensors.storage_key(tensor): tensor.untyped_storage() for tensor in made}
        left = iter(places)
        released = []
        for param, each in zip(plan.params, sent, strict=True):
            outputs = [place.output.untyped_storage() for _, place in zip(each.shapes, left, strict=False)]
            released += outputs if releases_gathered(param) else []
        if self._may_go_direct and not released:
            places = [
                replace(each, is_direct=each.is_stacked and each.rows.numel() >= self._direct_from_nbytes)
                for each in places
            ]
        direct = [place.output.untyped_storage() for place in places if place.is_direct]
        return _Made(places, kept, _sized(storages.values()), _sized(direct), released)

    def free(self) -> None:
        """Free the unsharded parameters' memory; their storage objects stay, for autograd's saved views alias them.

        The allocator returns it to the stream that allocated it: a side stream of the user's, if ``unshard`` ran there.
        """
        streams = self._plan.streams
        for stream in self._allocated_on:
            if stream != streams.compute:
                streams.order(stream, streams.mark(streams.compute))
        for storage, _ in [] if self._made is None else self._made.storages:
            streams.resize(storage, 0)


def _sized(storages: Iterable[torch.UntypedStorage]) -> Storages:
    return [(storage, storage.nbytes()) for storage in storages]


def _put_together(arrived: Tensor, output: Tensor, shape: torch.Size, cut: Cut) -> Tensor:
    """The whole of one tensor that every rank has sent, in ``output``, without the padding after the last rank's rows.

    arrived: (num_shards, nbytes), those of ``output`` if they lie there one after another
    """
    if cut.is_stacked:
        whole = output.view(cut.num_shards * (shape[0] if shape else 1), *shape[1:])
        if cut.dim == 0 and cut.shape[0] % cut.num_shards != 0:
            whole = whole.narrow(0, 0, cut.shape[0])
        return whole
    assert cut.dim is not None
    cut = replace(cut, shape=(*shape[: cut.dim], cut.shape[cut.dim], *shape[cut.dim + 1 :]))
    whole = storage_view(output.untyped_storage(), output, 0, cut.shape)
    assemble(arrived.view(output.dtype), cut, whole, padded=True)
    return whole
