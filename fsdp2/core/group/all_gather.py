"""One all-gather of a group: from the flat shard of every rank into the unsharded storage.

Two ways run side by side; the plan chooses one for each parameter. *Direct*: the collective writes the parameter in
place. *Packed*: one collective for all other parameters into a rank-major buffer, then one fused split-copy into the
param-major storage. Bounds, views, split sizes and the algorithm are computed once.

Worked example, 2 ranks, a direct (4, 8) and a packed (3,) parameter, align 32:

    flat shard          [16 direct][16 gap][2 packed][30 gap]
    unsharded storage   [32 the (4, 8) parameter][32 gap][3 the (3,) parameter, 1 padding][60 gap]
    direct              all-gather of elements [0, 16) into the storage's [0, 32)
    packed              all-gather of elements [32, 64) into a (2, 32) buffer; columns [0, 2) go to storage [64, 68)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...policy import AllGather
from ..comm import backends, collectives
from ..comm.streams import Event, Stream, Streams
from ..plan.layout import Cut, GroupLayout, group_layout
from .group_plan import GroupPlan
from .param import storage_view
from .rank_pieces import assemble

ALIGN_NBYTES = 16
"""Alignment of payloads sent as bytes: dtypes and the kernels that read them want aligned addresses."""


class FlatGatherPlan:
    """One all-gather into the unsharded storage, computed once.

    storage, nbytes:  the storage, and its size when it is allocated
    dtype, device:    of the unsharded parameters
    num_shards:       of the process group
    algorithm, async_op: of the collective
    allocates_early:  the pending gather writes the storage; a packed one on the host needs it only at copy-out
    direct_bounds:    of the flat shard, for each parameter that is gathered directly
    direct_outputs:   where each of these goes; ``own_rows``: this rank's part of it
    packed_start:     the first element of the flat shard that travels packed
    split_sizes, copy_outs: the columns of the packed rows, and where each goes
    rearranged:       (index of the column, cut, whole parameter) of each packed parameter that is not row-major
    """

    def __init__(
        self,
        group: GroupPlan,
        storage: torch.UntypedStorage,
        layout: GroupLayout,
        num_direct: int,
        process_group: dist.ProcessGroup,
        algorithm: backends.AllGatherAlgorithm | None,
    ) -> None:
        """Gather from flat shards that lie as ``layout`` says; the storage lies as the group's own layout says.

        storage:    allocated
        num_direct: the first slots are gathered directly
        algorithm:  None: ``backends`` chooses
        """
        self.storage, self.nbytes = storage, group.unsharded_nbytes
        self.dtype, self.device = group.param_dtype, group.device
        self.num_shards = num_shards = layout.num_shards
        backend = backends.backend_of(process_group, self.device.type)
        nbytes = layout.unsharded_numel * self.dtype.itemsize
        self.algorithm = algorithm or backends.choose_all_gather(backend, num_shards, nbytes, self.device.type)
        self.async_op = not backends.is_stream_ordered(backend)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        offsets = [slot.unsharded_offset for slot in group.layout.slots]
        direct, packed = layout.slots[:num_direct], layout.slots[num_direct:]
        self.allocates_early = bool(direct) or not group.streams.host_waits
        self.direct_bounds = [(slot.offset, slot.offset + slot.numel) for slot in direct]
        self.direct_outputs = [
            storage_view(storage, like, offset, (slot.unsharded_numel,))
            for slot, offset in zip(direct, offsets, strict=False)
        ]
        self.own_rows = [output.view(num_shards, -1)[process_group.rank()] for output in self.direct_outputs]
        self.packed_start = packed[0].offset if packed else layout.shard_numel
        self.split_sizes: list[int] = []
        self.copy_outs: list[Tensor] = []
        self.rearranged: list[tuple[int, Cut, Tensor]] = []
        for slot, offset in zip(packed, offsets[num_direct:], strict=True):
            if not slot.cut.is_row_major:
                whole = storage_view(storage, like, offset, slot.cut.shape)
                self.rearranged.append((len(self.split_sizes), slot.cut, whole))
            columns = [(slot.numel, offset)]
            if slot.gap > 0:  # the padding goes into the padding of the unsharded storage
                columns.append((slot.gap, offset + slot.unsharded_numel))
            for numel, start in columns:
                self.split_sizes.append(numel)
                self.copy_outs.append(storage_view(storage, like, start, (num_shards, numel)))


class Sender(Protocol):
    """What starts a ``Gathering``, and does the rest of it.

    coalesces_over: the process group over which its collective may share a launch with others; None: it never does
    packs:          it shares a collective instead, because the backend has no launches of several
    """

    coalesces_over: dist.ProcessGroup | None
    packs: bool

    def payload(self, gathering: Gathering) -> Tensor:
        """(n,): what this rank sends, if the gather ``packs``."""

    def to_send(self, gathering: Gathering) -> tuple[list[Tensor], list[Tensor]]:
        """The (outputs, inputs) of a collective, on the gather stream; the packed ones come first."""

    def copy_out(self, gathering: Gathering) -> None:
        """What follows the collective, on the gather stream."""


class Gathering:
    """One gather under way. ``start`` returns it: a gather that could not start looks like none.

    sender:  None if nothing is sent
    flat:    this rank's flat shard, if there is one
    held:    what is sent instead, if the user may write ``flat``
    packed:  all ranks' rows, (W, n), of what travels packed
    sent:    what the sender keeps of each parameter until the gather has finished
    pending: the collective, if the host waits for it
    is_sent: it is issued, and has not landed
    event:   after all work of the gather
    """

    def __init__(self, streams: Streams, started_on: Stream, sender: Sender | None = None, flat: Tensor | None = None):
        """started_on: the stream that is compute now, if the memory of ``held`` is from there"""
        self._streams = streams
        self._started_on = started_on
        self.sender = sender
        self.flat = flat
        self.held: Tensor | None = None
        self.packed: Tensor | None = None
        self.sent: list[Any] = []
        self.pending: collectives.Works | None = None
        self.is_sent = False
        self.event: Event = None

    def note_sent(self) -> None:
        """The collective is issued, on the gather stream: the rest follows, or, where the host waits, in ``finish``."""
        self.is_sent = True
        if not self._streams.host_waits:
            self._land()

    def _land(self) -> None:
        self.is_sent = False
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.finish()
        if self.sender is not None:
            self.sender.copy_out(self)
        self.event = self._streams.mark(self._streams.gather)

    def finish(self) -> None:
        """Wait; then compute may use and free the unsharded memory, and ``flat`` may be written."""
        if self.is_sent:
            self._land()
        streams = self._streams
        streams.order(streams.compute, self.event)
        if self.held is not None and self._started_on != streams.compute:  # its memory goes back to that stream
            streams.order(self._started_on, self.event)
        self.event = self.held = None

    @property
    def buffer_nbytes(self) -> int:
        """Bytes that the gather takes in addition to the unsharded memory."""
        return (0 if self.packed is None else self.packed.nbytes) + (0 if self.held is None else self.held.nbytes)


class Gather:
    """Fills a group's unsharded storage from the flat shards of ``process_group``."""

    def __init__(
        self,
        group: GroupPlan,
        storage: torch.UntypedStorage,
        process_group: dist.ProcessGroup,
        comm: AllGather | None,
        smaller: GroupLayout | None = None,
    ) -> None:
        """See ``FlatGatherPlan``.

        comm:    a communicator of the user's, which sees the parameters without gaps between them. torch's contract
                 with it: one buffer for the output, (W * n,), whose own slice is the input. So these groups travel
                 packed, and pay copies that others do not.
        smaller: of flat shards over the smaller mesh, if those are sent
        """
        layout, num_direct = (group.layout, group.num_direct) if smaller is None else (smaller, 0)
        algorithm = group.options.all_gather
        self._pieces = [(slot.offset, slot.offset + slot.numel) for slot in layout.slots]
        if comm is not None:
            num_direct, algorithm = 0, "stock"
            layout = group_layout([slot.cut for slot in layout.slots], num_shards=layout.num_shards, align=1)
        self.plan = plan = FlatGatherPlan(group, storage, layout, num_direct, process_group, algorithm)
        self._process_group = process_group
        self._rank = process_group.rank()
        self._comm = comm
        self._streams = group.streams
        self.packs = plan.async_op and algorithm is None and num_direct == 0
        shares = self.packs or (comm is None and not plan.async_op and plan.algorithm == "stock")
        self.coalesces_over = process_group if shares else None
        self.forget()

    def forget(self) -> None:
        """Drop the references to the last flat shard: the next gather reads another."""
        self._flat: Tensor | None = None
        self._flat_inputs: list[Tensor] = []

    def start(self, flat: Tensor | None, copy: bool, together: list[Gathering] | None = None) -> Gathering:
        """Issue the collectives, and queue their copy-out.

        flat:       (layout.shard_numel,), this rank's flat shard, in its storage dtype, on the device where it is kept
        copy:       read ``flat`` now, so that it may be written before ``finish``
        together:   a list to which this gather is added, for ``send_together`` to issue it with others
        Collective: yes, over ``process_group``.
        """
        assert flat is not None
        streams, plan = self._streams, self.plan
        behind = streams.compute
        gathering = Gathering(streams, behind, self, flat)
        held = None
        if copy:  # on compute, as the user's writes are: a copy made on another stream would race with them
            if flat.dtype is plan.dtype or flat.device != plan.device:
                held = flat.to(plan.device, copy=True).to(plan.dtype)
            else:  # the cast is a copy
                held = flat.to(plan.dtype)
            gathering.held = held
        # Resizing would move a kept storage.
        if plan.allocates_early and plan.storage.nbytes() == 0:
            streams.resize(plan.storage, plan.nbytes)
        if plan.own_rows and held is None and (flat.dtype is not plan.dtype or flat.device != plan.device):
            streams.order(streams.copy_in, streams.mark(streams.compute))
            behind = streams.copy_in  # not the gather stream, where the collective before this one may still run
            with streams.on(behind):
                self._fill_own_rows(flat)
        if self.coalesces_over is None:
            together = None
        if together is None or behind is streams.copy_in:
            streams.order(streams.gather, streams.mark(behind))
        if together is not None:
            together.append(gathering)
            return gathering
        with streams.on(streams.gather):
            if self._comm is not None:
                self._send_by(self._comm, gathering)
            else:
                outputs, inputs = self.to_send(gathering)
                gathering.pending = collectives.all_gather(
                    outputs, inputs, self._process_group, plan.algorithm, plan.async_op
                )
            gathering.note_sent()
        return gathering

    def _fill_own_rows(self, flat: Tensor) -> None:
        """Cast, or copy to the device, this rank's part of the direct outputs, in place: that takes no other buffer."""
        shards = flat[: self.plan.direct_bounds[-1][1]].to(self.plan.device, non_blocking=True)
        torch._foreach_copy_(self.plan.own_rows, [shards[start:stop] for start, stop in self.plan.direct_bounds])

    def _send_by(self, comm: AllGather, gathering: Gathering) -> None:
        source = self.payload(gathering)
        sizes = [stop - start for start, stop in self._pieces]
        numel = sum(sizes)
        output = comm.allocate((numel * self.plan.num_shards,), dtype=source.dtype, device=source.device)
        own = output.narrow(0, numel * self._rank, numel)
        torch._foreach_copy_(list(torch.split(own, sizes)), [source[start:stop] for start, stop in self._pieces])
        is_async = gathering.held is not None  # the user unshards asynchronously
        work = comm(output_tensor=output, input_tensor=own, group=self._process_group, async_op=is_async)
        gathering.packed, gathering.pending = output, collectives.Works([work])

    def to_send(self, gathering: Gathering) -> tuple[list[Tensor], list[Tensor]]:
        plan = self.plan
        flat, source = gathering.flat, gathering.held
        assert flat is not None
        if source is None and (flat.dtype is not plan.dtype or flat.device != plan.device):
            # In place: each input is a row of its output.
            if not plan.split_sizes:
                return plan.direct_outputs, plan.own_rows
            rest = flat if plan.packed_start == 0 else flat[plan.packed_start :]
            rest = rest.to(plan.device, non_blocking=True)
            gathering.packed = packed = rest.new_empty(rest.numel() * plan.num_shards, dtype=plan.dtype)
            row = packed.narrow(0, rest.numel() * self._rank, rest.numel()).copy_(rest)
            return [packed, *plan.direct_outputs], [row, *plan.own_rows]
        if source is None:
            source = flat.to(plan.device, non_blocking=True)
        if source is self._flat:
            inputs = self._flat_inputs
        else:
            if plan.packed_start == 0 and plan.split_sizes:  # everything is packed
                inputs = [source]
            else:
                inputs = [source[start:stop] for start, stop in plan.direct_bounds]
                if plan.split_sizes:
                    inputs.insert(0, source[plan.packed_start :])
            if source is flat:  # the views of the shard itself are cut once
                self._flat, self._flat_inputs = source, inputs
        if not plan.split_sizes:
            return plan.direct_outputs, inputs
        gathering.packed = packed = source.new_empty((source.numel() - plan.packed_start) * plan.num_shards)
        return [packed, *plan.direct_outputs], inputs

    def payload(self, gathering: Gathering) -> Tensor:
        if gathering.held is not None:
            return gathering.held
        assert gathering.flat is not None
        return gathering.flat.to(self.plan.device, non_blocking=True).to(self.plan.dtype)

    def copy_out(self, gathering: Gathering) -> None:
        plan = self.plan
        if plan.storage.nbytes() == 0:  # see ``allocates_early``
            self._streams.resize(plan.storage, plan.nbytes)
        packed, gathering.packed = gathering.packed, None
        if packed is not None:
            rows = packed.view(plan.num_shards, -1)
            outs = plan.copy_outs
            if plan.rearranged:
                outs = list(outs)
                for index, _, _ in plan.rearranged:
                    outs[index] = rows.new_empty(plan.num_shards, plan.split_sizes[index])
            torch.split_with_sizes_copy(rows, plan.split_sizes, dim=1, out=outs)
            for index, cut, whole in plan.rearranged:
                assemble(outs[index], cut, whole)


class LocalGather:
    """The gather over a single rank, which moves nothing: its flat shard is laid out as the unsharded storage is.

    If the flat shard has the compute dtype and lies on the right device, the unsharded parameters share its storage;
    else one copy fills them at each unshard.
    """

    def __init__(self, group: GroupPlan, storage: torch.UntypedStorage, shares: bool) -> None:
        """shares: ``storage`` is that of the flat shard"""
        self._storage = storage
        self._nbytes = group.unsharded_nbytes
        self._streams = group.streams
        like = torch.empty(0, dtype=group.param_dtype, device=group.device)
        self._whole = None if shares else storage_view(storage, like, 0, (group.layout.shard_numel,))

    def start(self, flat: Tensor | None, copy: bool, together: list[Gathering] | None = None) -> Gathering:
        """Collective: no. ``flat`` is read until ``finish``, unless ``copy``."""
        assert flat is not None
        streams = self._streams
        gathering = Gathering(streams, None)
        if self._whole is None:
            streams.join_capture(streams.gather)
            gathering.event = streams.mark(streams.gather)  # this stream may wait for an optimizer's event
            return gathering
        if self._storage.nbytes() == 0:
            streams.resize(self._storage, self._nbytes)
        if copy:  # on compute, as the user's writes are
            self._fill(flat, non_blocking=False)
            gathering.event = streams.mark(streams.compute)  # may be a side stream of the user's
            return gathering
        streams.order(streams.gather, streams.mark(streams.compute))
        with streams.on(streams.gather):
            self._fill(flat, non_blocking=True)
        gathering.event = streams.mark(streams.gather)
        return gathering

    def _fill(self, flat: Tensor, non_blocking: bool) -> None:
        whole = self._whole
        assert whole is not None
        if flat.device != whole.device and flat.dtype is not whole.dtype:  # else the host would cast, and wait
            flat = flat.to(whole.device, non_blocking=non_blocking)
        whole.copy_(flat, non_blocking=non_blocking)


def send_together(waiting: Sequence[Gathering], streams: Streams) -> None:
    """Issue the collectives of started gathers, one launch per process group. Collective: yes, over each."""
    by_group: dict[dist.ProcessGroup, list[tuple[Gathering, Sender]]] = {}
    for each in waiting:
        assert each.sender is not None
        assert each.sender.coalesces_over is not None
        by_group.setdefault(each.sender.coalesces_over, []).append((each, each.sender))
    streams.order(streams.gather, streams.mark(streams.compute))
    with streams.on(streams.gather):
        # All memory before the first launch: without enough of it, nothing is sent.
        sends = {
            process_group: [] if several[0][1].packs else [sender.to_send(each) for each, sender in several]
            for process_group, several in by_group.items()
        }
        for process_group, several in by_group.items():
            if several[0][1].packs:
                _send_as_one(several, process_group)
            else:
                sent = sends[process_group]
                outputs = [output for outputs, _ in sent for output in outputs]
                inputs = [input_ for _, inputs in sent for input_ in inputs]
                collectives.all_gather(outputs, inputs, process_group, "stock", async_op=False)
        for each in waiting:
            each.note_sent()


def _send_as_one(waiting: Sequence[tuple[Gathering, Sender]], process_group: dist.ProcessGroup) -> None:
    """Pack payloads as bytes, and issue one collective."""
    own = [sender.payload(gathering) for gathering, sender in waiting]
    device = own[0].device
    sizes = [(sent.nbytes, -sent.nbytes % ALIGN_NBYTES) for sent in own]
    bounds = [size for pair in sizes for size in pair]
    packed = torch.empty(process_group.size(), sum(bounds), dtype=torch.uint8, device=device)
    row = packed[process_group.rank()]
    torch._foreach_copy_(list(torch.split(row, bounds)[::2]), [sent.view(torch.uint8) for sent in own])
    backend = backends.backend_of(process_group, device.type)
    algorithm = backends.choose_all_gather(backend, process_group.size(), packed.nbytes, device.type)
    pending = collectives.all_gather([packed.view(-1)], [row], process_group, algorithm, True)
    for (gathering, _), sent, columns in zip(waiting, own, torch.split(packed, bounds, dim=1)[::2], strict=True):
        gathering.packed, gathering.pending = columns.view(sent.dtype), pending
