"""One all-gather of parameters with memory of their own: each tensor that an extension (``extensions.py``) sends gets a storage.

This file lays out the tensors to send and owns the memory of the gathered ones.

Worked example, a (5, 4) weight over 2 ranks that sends rows of int8 and one scale a row:

    shards       rows [0, 3) and [3, 5)
    to send      (3, 4) int8 and (3,) fp32; rank 1 has (2, 4) and (2,), padded to the same: 24 bytes a rank, one collective
    gathered     (5, 4) int8 and (5,) fp32, views of storages with room for 6 rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policy import AllGather
from .. import torch_compat as compat
from ..comm import backends, collectives
from ..comm.streams import Event, Stream, Streams
from ..plan.layout import Cut
from ..plan.mesh import DataParallelMesh
from .all_gather import ALIGN_NBYTES, Waiting
from .extensions import Extensions, releases_gathered, require_same_kinds
from .param import ShardedParam, new_unsharded_param, storage_view
from .rank_pieces import join


@dataclass
class _Sent:
    """What one parameter sends in one gather.

    shapes, dtypes: of the tensors, padded to the same on all ranks
    metadata:       from ``fsdp_pre_all_gather``, for ``fsdp_post_all_gather``
    """

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    metadata: Any


@dataclass
class _Direct:
    """Tensors that are gathered straight into their outputs, from the second gather on.

    are_these: for each tensor that is sent, whether it is one of them
    outputs:   bytes, 1-D
    own_rows:  of each output, the row that this rank fills
    storages:  of the outputs, and their sizes
    """

    are_these: list[bool]
    outputs: list[Tensor]
    own_rows: list[Tensor]
    storages: list[tuple[torch.UntypedStorage, int]]


class ExtensionGather:
    """All-gathers parameters with memory of their own; reusable, one use at a time.

    coalesces_over: the process group over which the collective may share a launch with others; None if it never may

    The first gather packs all tensors into one buffer. Where the collective may share a launch, later gathers send large tensors
    straight into the outputs that the first one has made.

    Its attributes are of three kinds: the arguments, the state of the gather under way, and what the first gather makes.

    Note: extensions and streams. What ``start`` allocates lies on the gather stream and is read on compute, by ``fill`` and
    (metadata) by the user's operations. ``fill`` orders the gather stream after those reads, so that no later gather writes memory
    that the host has freed while compute still reads it. ``start`` cannot do that where a gather runs alongside the loss. With
    ``copy``, tensors are packed on the stream that is compute at ``start``, perhaps a side stream of the user's, which ``fill`` orders
    in the same way.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh: DataParallelMesh,
        device: torch.device,
        streams: Streams,
        param_dtype: torch.dtype,
        mp_policy: Any,
        comm: AllGather | None,
        algorithm: backends.AllGatherAlgorithm | None,
        direct_from_nbytes: float,
    ) -> None:
        """params:             the gather sends their ``local``
        comm:               a custom communicator
        direct_from_nbytes: the least size, of all ranks together, of a tensor that is gathered straight into its output
        """
        self._params = params
        self._num_shards = mesh.shard_size
        self._shard_rank = mesh.shard_rank
        self._process_group = mesh.shard_group
        self._extensions = Extensions(mesh, device, param_dtype, mp_policy)
        self._device = device
        self._streams = streams
        self._comm = comm if mesh.shard_size > 1 else None
        self._algorithm = algorithm
        self._backend = backends.backend_of(mesh.shard_group, device.type)
        alone = self._comm is not None or algorithm not in (None, "stock") or not backends.is_stream_ordered(self._backend)
        self._may_go_direct = not alone
        if streams.host_waits:
            alone = self._comm is not None or algorithm is not None or backends.is_stream_ordered(self._backend)
        self.coalesces_over = None if alone else mesh.shard_group
        self._direct_from_nbytes = direct_from_nbytes
        self._allocated_on: tuple[Stream, ...] = ()  # the compute streams on which the unsharded memory was allocated
        # of the gather under way
        self._sent: list[_Sent] = []
        self._packed: Tensor | None = None
        self._packed_on: set[Stream] = set()  # the compute streams whose memory ``_packed`` and metadata were, in any gather
        self._pending: collectives.Pending | None = None
        self._event: Event = None
        # made by the first gather
        self._kinds: list[tuple[list[torch.Size], list[torch.dtype]]] = []
        self._outputs: list[list[Tensor]] = []  # for each parameter, 1-D, with padding
        self._writers: list[Tensor] = []  # the same storages as bytes, (W, n), with version counters of their own
        self._kept: list[tuple[Tensor, ...]] = []  # for each parameter, the tensors that fsdp_post_all_gather asks to free
        self._are_gaps: list[bool] = []  # of the writers: those that take the padding after a payload
        self._rearranged: list[int] = []  # writers whose tensor is put together after it has arrived
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._released: list[torch.UntypedStorage] = []  # those that are freed as soon as the unsharded parameters are made
        self._direct: _Direct | None = None

    # --- start ---

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, flat: Tensor | None, copy: bool, together: list[Waiting] | None = None) -> None:
        """Ask the parameters what to send and issue the collective. See ``Gather.start``; there is no flat shard here.

        Collective: yes, over the shard axis; an extension may communicate over it as well.
        """
        streams = self._streams
        if self._sent:  # of a gather that was not used, while ``free`` keeps the memory
            self._let_go()
        self._allocated_on = ()
        if self._direct is not None:
            self._allocate(self._direct.storages)
        if together is not None and streams.host_waits and self.coalesces_over is not None:
            self._pack(non_blocking=False, own_row_only=True)
            together.append((self, self._packed))
            self._packed = None
            return
        on_compute = copy or streams.host_waits  # where the user's writes are
        if on_compute:
            self._pack(non_blocking=False)
            self._packed_on.add(streams.compute)
        streams.order(streams.gather, streams.mark(streams.compute))
        with streams.on(streams.gather):
            if not on_compute:
                self._pack(non_blocking=True)
            if together is not None and self.coalesces_over is not None:
                together.append((self, None))
                return
            self._send(copy)
            self.land()

    def to_send(self, flat: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """What the collective gathers: (outputs, inputs); each input is this rank's own row of an output."""
        packed, direct = self._packed, self._direct
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        if packed is not None:
            numel = packed.numel() // self._num_shards
            outputs, inputs = [packed], [packed.narrow(0, numel * self._shard_rank, numel)]
        if direct is not None:
            outputs += direct.outputs
            inputs += direct.own_rows
        return outputs, inputs

    def _send(self, async_op: bool) -> None:
        """async_op: whether the user asked for an asynchronous unshard; only custom communicators learn of it."""
        process_group = self._process_group
        if process_group is None:
            return
        outputs, inputs = self.to_send(None)
        if self._comm is not None:
            work = self._comm(output_tensor=outputs[0], input_tensor=inputs[0], group=process_group, async_op=async_op)
            self._pending = collectives.Works([work])
            return
        algorithm = self._algorithm or backends.choose_all_gather(self._backend, self._num_shards, outputs[0].nbytes, self._device.type)
        is_async = not backends.is_stream_ordered(self._backend)
        self._pending = collectives.all_gather(outputs, inputs, process_group, algorithm, is_async)

    def receive(self, rows: Tensor, pending: collectives.Pending) -> None:
        """See ``Gather.receive``."""
        self._packed, self._pending = rows, pending

    def land(self) -> None:
        self._event = self._streams.mark(self._streams.gather)

    def _pack(self, non_blocking: bool, own_row_only: bool = False) -> None:
        """Copy the tensors of every parameter into this rank's row of its output, if it is direct, or of a buffer.

        own_row_only: the buffer has no rows for other ranks
        """
        pieces: list[Tensor] = []
        sent: list[_Sent] = []
        for param in self._params:
            tensors, metadata = self._extensions.to_send(param, non_blocking)
            pieces += tensors
            sent.append(_Sent([each.shape for each in tensors], [each.dtype for each in tensors], metadata))
        kinds = [(each.shapes, each.dtypes) for each in sent]
        if self._kinds:
            require_same_kinds(self._params, self._kinds, kinds)
        self._kinds = kinds
        self._sent = sent
        direct = self._direct
        if direct is not None:
            straight = [piece.reshape(-1).view(torch.uint8) for piece, is_one in zip(pieces, direct.are_these, strict=True) if is_one]
            torch._foreach_copy_(direct.own_rows, straight)
            pieces = [piece for piece, is_one in zip(pieces, direct.are_these, strict=True) if not is_one]
            if not pieces:
                return
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
        num_rows, own_row = (1, 0) if own_row_only else (self._num_shards, self._shard_rank)
        packed: Tensor = allocate((numel * num_rows,), dtype=dtype, device=self._device)
        own = packed.narrow(0, numel * own_row, numel)
        torch._foreach_copy_(list(torch.split(own, sizes)[::2]), rows)
        self._packed = packed

    def _gap_nbytes(self, nbytes: int) -> int:
        """Bytes of padding that align the next payload. A custom communicator gets none: upstream's contract has none."""
        return 0 if self._comm is not None else -nbytes % ALIGN_NBYTES

    # --- finish ---

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """Order compute after the gather. Then either ``fill`` or ``free``, once per ``start``."""
        streams = self._streams
        if self._pending is not None:
            self._pending.finish()
            self._pending = None
        streams.order(streams.compute, self._event)
        self._event = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self) -> None:
        """Give the unsharded parameters their values. If an extension raises, or memory runs out, ``free`` follows."""
        first = not self._storages
        try:
            self._fill(self._packed, self._sent, first)
        except BaseException:
            if first:
                self._drop_made()
            raise
        finally:
            self._let_go()

    def _fill(self, packed: Tensor | None, sent: list[_Sent], first: bool) -> None:
        streams = self._streams
        if first:
            self._make_outputs(sent)
            self._allocated_on = (streams.compute,)
        else:
            self._allocate(self._storages)
        outs = list(self._writers)
        for index in self._rearranged:
            outs[index] = torch.empty_like(outs[index])
        if packed is not None:
            rows = packed.view(self._num_shards, packed.numel() // self._num_shards).view(torch.uint8)
            torch.split_with_sizes_copy(rows, [out.shape[1] for out in outs], dim=1, out=outs)
        arrived = iter([out for out, is_gap in zip(outs, self._are_gaps, strict=True) if not is_gap])
        if self._direct is not None:
            packed_ones, straight = arrived, iter(self._direct.outputs)
            arrived = iter([next(straight if is_one else packed_ones) for is_one in self._direct.are_these])
        for index, (param, each) in enumerate(zip(self._params, sent, strict=True)):
            gathered = tuple(
                _put_together(next(arrived), output, shape, param.spec.cut)
                for output, shape in zip(self._outputs[index], each.shapes, strict=True)
            )
            if first:
                whole, kept = self._extensions.make_unsharded(param, gathered, each.metadata)
                self._kept.append(kept)
                param.unsharded = new_unsharded_param(param, param.spec.to_logical(whole))
            else:
                self._extensions.refill_unsharded(param, gathered, each.metadata, self._kept[index])
        if first:
            made = [tensor for tensors in (*self._outputs, *self._kept) for tensor in tensors]
            storages = {compat.storage_key(tensor): tensor.untyped_storage() for tensor in made}
            self._storages = [(storage, storage.size()) for storage in storages.values()]
            self._released = [
                output.untyped_storage()
                for param, outputs in zip(self._params, self._outputs, strict=True)
                if releases_gathered(param)
                for output in outputs
            ]
            if self._may_go_direct and not self._released:
                self._choose_direct()
        for storage in self._released:
            streams.resize(storage, 0)

    def _let_go(self) -> None:
        """Drop what was gathered; no later gather may write its memory before compute has read it."""
        streams = self._streams
        self._packed, self._sent = None, []
        streams.order(streams.gather, streams.mark(streams.compute))
        for stream in self._packed_on:
            if stream != streams.compute:
                streams.order(stream, streams.mark(streams.compute))

    def _allocate(self, storages: list[tuple[torch.UntypedStorage, int]]) -> None:
        """Allocate the storages that have no memory, on compute."""
        streams = self._streams
        for storage, nbytes in storages:
            if storage.nbytes() != nbytes:
                streams.resize(storage, nbytes)
        if streams.compute not in self._allocated_on:
            self._allocated_on = (*self._allocated_on, streams.compute)

    def _choose_direct(self) -> None:
        """From now on gather large tensors straight into their outputs, if nothing has to be put together afterwards."""
        direct = _Direct([], [], [], [])
        left: list[tuple[Tensor, bool, bool]] = []
        is_one = False
        for index, (writer, is_gap) in enumerate(zip(self._writers, self._are_gaps, strict=True)):
            is_rearranged = index in self._rearranged
            if not is_gap:
                is_one = not is_rearranged and writer.numel() >= self._direct_from_nbytes
                direct.are_these.append(is_one)
            if not is_one:
                left.append((writer, is_gap, is_rearranged))
            elif not is_gap:  # the padding after it is not sent
                storage = writer.untyped_storage()
                direct.outputs.append(writer.view(-1))
                direct.own_rows.append(writer[self._shard_rank])
                direct.storages.append((storage, storage.nbytes()))
        if direct.outputs:
            self._direct = direct
            self._writers = [writer for writer, _, _ in left]
            self._are_gaps = [is_gap for _, is_gap, _ in left]
            self._rearranged = [index for index, (_, _, is_rearranged) in enumerate(left) if is_rearranged]

    def _make_outputs(self, sent: list[_Sent]) -> None:
        raw = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._outputs, self._writers, self._kept, self._rearranged, self._are_gaps = [], [], [], [], []
        for param, each in zip(self._params, sent, strict=True):
            outputs = []
            for shape, dtype in zip(each.shapes, each.dtypes, strict=True):
                nbytes = shape.numel() * dtype.itemsize
                gap = self._gap_nbytes(nbytes)
                storage = torch.empty(self._num_shards * (nbytes + gap), dtype=torch.uint8, device=self._device).untyped_storage()
                like = torch.empty(0, dtype=dtype, device=self._device)
                outputs.append(storage_view(storage, like, 0, (self._num_shards * shape.numel(),)))
                if not param.spec.cut.is_stacked:
                    self._rearranged.append(len(self._writers))
                self._writers.append(storage_view(storage, raw, 0, (self._num_shards, nbytes)))
                self._are_gaps.append(False)
                if gap > 0:
                    self._writers.append(storage_view(storage, raw, self._num_shards * nbytes, (self._num_shards, gap)))
                    self._are_gaps.append(True)
            self._outputs.append(outputs)

    def _drop_made(self) -> None:
        """Drop the unsharded parameters after some of them could not be made: the next gather makes them all."""
        self._outputs, self._writers, self._kept = [], [], []
        for param in self._params:
            param.unsharded = None

    def free(self) -> None:
        """Free the unsharded parameters' memory; their storage objects stay, for autograd's saved views alias them.

        The allocator gives it to the stream on which it was allocated: a side stream of the user's, if ``unshard`` was called there.
        """
        streams = self._streams
        if self._sent:
            self._let_go()
        for stream in self._allocated_on:
            if stream != streams.compute:
                streams.order(stream, streams.mark(streams.compute))
        for storage, _ in self._storages:
            streams.resize(storage, 0)


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
    whole = storage_view(output.untyped_storage(), output, 0, (*shape[: cut.dim], cut.shape[cut.dim], *shape[cut.dim + 1 :]))
    join(arrived.view(output.dtype).view(cut.num_shards, *shape), cut.dim, whole)
    return whole
