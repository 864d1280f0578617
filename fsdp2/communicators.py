"""Communicators of ours, with buffers from the process group's allocator or symmetric memory, by upstream's contract.

A custom communicator sees what torch's FSDP2 would show it. All-gather: one buffer for the whole output, (W * n,),
whose slice of this rank is the input, without gaps between parameters. Reduce-scatter: the input (W * n,), then the
output (n,), both allocated by the communicator, for just the parameters that have a gradient. So these groups travel
packed, and pay copies that others do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .policy import AllGather, ReduceScatter
from .torch_names import torch_collectives

if TYPE_CHECKING:
    from typing_extensions import Self


class _OwnMemory:
    """Buffers from the process group's allocator, or from the symmetric memory pool of a device.

    symmetric: the backend of symmetric memory; None: the process group's allocator
    """

    def __init__(self, process_group: dist.ProcessGroup, symmetric: str | None = None) -> None:
        """Collective: with ``symmetric``, over ``process_group``."""
        self._process_group = process_group
        self.symmetric = symmetric
        if symmetric is not None:
            torch_collectives.init_symmetric_memory(process_group, symmetric)

    def over(self, process_group: dist.ProcessGroup) -> Self:
        """The same for another process group. Collective: as ``__init__``."""
        return type(self)(process_group, self.symmetric)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = math.prod(size)
        if self.symmetric is None:
            return torch_collectives.process_group_empty(self._process_group, numel, dtype, device)
        return torch_collectives.symmetric_empty(numel, dtype, device)

    def _rendezvous(self, group: dist.ProcessGroup, *buffers: Tensor) -> None:
        if self.symmetric is not None:
            for buffer in buffers:
                torch_collectives.rendezvous(buffer, group)


class OwnAllGather(_OwnMemory, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._rendezvous(group, output_tensor)
        return torch_collectives.all_gather_single(output_tensor, input_tensor, group, async_op)


class OwnReduceScatter(_OwnMemory, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._rendezvous(group, input_tensor, output_tensor)
        return torch_collectives.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
