"""Collectives for which the user, or the process group's allocator, provides buffers or calls, by upstream's contract.

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

from ...policy import AllGather, ReduceScatter
from ...torch_names import torch_collectives
from ...user_warnings import warn
from .collectives import Pending, Works
from .division import Division

if TYPE_CHECKING:
    from typing_extensions import Self


def comm_reduce_scatter(
    comm: ReduceScatter, output: Tensor, buffer: Tensor, process_group: dist.ProcessGroup, division: Division
) -> Pending:
    """Reduce ``buffer`` (W * n,) to ``output`` (n,), both from ``comm.allocate``. Collective: yes."""
    if division.predivide is not None:
        buffer.div_(division.predivide)
    work = comm(output_tensor=output, input_tensor=buffer, group=process_group, op=division.op)
    return Works([work], (), output, division.postdivide)


# --- memory that the process group allocates --------------------------------------------------------------------------


class _ProcessParamGroup:
    """Buffers from the process group's allocator, if its backend has one for the device."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def over(self, process_group: dist.ProcessGroup) -> Self:
        """The same for another process group. Collective: no."""
        return type(self)(process_group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch_collectives.process_group_empty(self._process_group, math.prod(size), dtype, device)


class _SymmetricMemory:
    """Buffers from the symmetric memory pool of a device."""

    def __init__(self, process_group: dist.ProcessGroup, backend: str) -> None:
        self._backend = backend
        torch_collectives.init_symmetric_memory(process_group, backend)

    def over(self, process_group: dist.ProcessGroup) -> Self:
        """The same for another process group. Collective: yes, over ``process_group``."""
        return type(self)(process_group, self._backend)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch_collectives.symmetric_empty(math.prod(size), dtype, device)


class ProcessGroupAllGather(_ProcessParamGroup, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return torch_collectives.all_gather_single(output_tensor, input_tensor, group, async_op)


class ProcessGroupReduceScatter(_ProcessParamGroup, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return torch_collectives.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class SymmetricAllGather(_SymmetricMemory, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        torch_collectives.rendezvous(output_tensor, group)
        return torch_collectives.all_gather_single(output_tensor, input_tensor, group, async_op)


class SymmetricReduceScatter(_SymmetricMemory, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        torch_collectives.rendezvous(input_tensor, group)
        torch_collectives.rendezvous(output_tensor, group)
        return torch_collectives.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def warn_without_effect(setter: str, why: str) -> None:
    """Warn once per process that ``setter`` does nothing here."""
    warn(f"{setter} has no effect here: {why}", once=setter)
