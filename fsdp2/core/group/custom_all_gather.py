"""One all-gather of a group through a communicator that the user brought.

Upstream's contract allows no gap between parameters and one buffer for the whole output, (W * n,), of which the input is this rank's
own slice. So these groups travel packed, and pay copies that others do not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...policy import AllGather
from ..comm.communicators import CommWork
from ..comm.streams import Streams
from ..plan.layout import GroupLayout, group_layout
from .all_gather import Gather, GatherTarget


class CommGather(Gather):
    """An all-gather through a custom communicator."""

    __slots__ = ("_bounds", "_comm", "_sizes")

    def __init__(
        self, layout: GroupLayout, target: GatherTarget, process_group: dist.ProcessGroup, streams: Streams, comm: AllGather
    ) -> None:
        """layout: of the flat shard; the collective sends it without gaps."""
        compact = group_layout([slot.cut for slot in layout.slots], num_shards=layout.num_shards, align=1)
        super().__init__(compact, 0, target, process_group, streams, "stock")
        self.coalesces_over = None
        self._comm = comm
        self._bounds = [(slot.offset, slot.offset + slot.numel) for slot in layout.slots]
        self._sizes = [slot.numel for slot in layout.slots]

    def _send(self, flat: Tensor, copy: bool) -> None:
        source = self._held
        if source is None:
            source = flat.to(self._target.device, non_blocking=True).to(self._target.dtype)
        inputs = [source[start:stop] for start, stop in self._bounds]
        numel = sum(self._sizes)
        output = self._comm.allocate((numel * self._num_shards,), dtype=source.dtype, device=source.device)
        own = output.narrow(0, numel * self._rank, numel)
        torch._foreach_copy_(list(torch.split(own, self._sizes)), inputs)
        assert self._process_group is not None
        work = self._comm(output_tensor=output, input_tensor=own, group=self._process_group, async_op=copy)
        self._packed = output
        self._pending = CommWork(work)
