"""Choices of the user: small values, which ``fully_shard`` reads once.

Every class has the fields and defaults of its namesake in ``torch.distributed.fsdp``, and descends from it, so that ``isinstance``
checks elsewhere hold; objects of torch's own classes are accepted wherever these are. Each says all of its fields itself, for an older
torch has fewer.

    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # parameters are stored in fp32, all-gathered and used in bf16; gradients are cast to fp32, then reduce-scattered
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .errors import ArgumentError, got

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DiskOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
]

TorchCPUOffloadPolicy = torch_fsdp.CPUOffloadPolicy
"""fsdp2's policies derive from these classes of torch's, so that it accepts torch's own objects as well."""


class _Frozen:
    """What ``frozen=True`` does: dataclasses that descend from torch's unfrozen ones cannot say it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name not in self.__dataclass_fields__:  # type: ignore[attr-defined]  # ``__init__`` sets each once
            raise FrozenInstanceError(f"cannot assign to {name!r} of a {type(self).__name__}: make another with dataclasses.replace")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name!r} of a {type(self).__name__}")


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    """Dtypes at the boundary of a sharded module.

    param_dtype:          dtype of the unsharded parameters, of the all-gather and so of forward and backward; None keeps
                          each parameter's own dtype. The sharded parameters (what the optimizer sees) keep theirs.
    reduce_dtype:         dtype in which gradients are reduced, and accumulated while gradient sync is off; None: with torch before
                          2.15 the dtype in which they were computed, from 2.15 on ``param.grad_dtype`` if it was set, else the
                          parameter's own dtype (``fsdp2.set_semantics`` chooses one of the two).
    output_dtype:         floating-point outputs of forward are cast to it; None: left alone.
    cast_forward_inputs:  whether floating-point inputs of forward are cast to ``param_dtype``.
    param_dtype_override_fn: asked once for each parameter, at ``fully_shard``: its own dtype keeps it as it is, ``param_dtype`` or None
                          do what ``param_dtype`` says. It must give the same answer on all ranks.

    Example:
        policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp2.fully_shard(net, mp_policy=policy)
        net(x).dtype  # torch.bfloat16
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)


@dataclass(unsafe_hash=True)
class OffloadPolicy(_Frozen, torch_fsdp.OffloadPolicy):
    """No offloading; the default.

    Example:
        fsdp2.fully_shard(net, offload_policy=fsdp2.OffloadPolicy())  # as without the argument
    """


@dataclass(unsafe_hash=True)
class CPUOffloadPolicy(OffloadPolicy, torch_fsdp.CPUOffloadPolicy):
    """Keeps sharded parameters and gradients, and so optimizer state, in host memory.

    pin_memory: page-locked host memory, which lets copies overlap with compute; takes it away from other processes.

    Example:
        fsdp2.fully_shard(net, offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False))
    """

    pin_memory: bool = True


@dataclass(unsafe_hash=True)
class DiskOffloadPolicy(OffloadPolicy):
    """Given to ``fully_shard``: sharded parameters live in files, and gradients in host memory. Given to
    ``fsdp2.optim.offloaded``: optimizer states live in files. The files have no names, and end with the process.

    path:       a folder on a local disk, that exists; ranks of a host may share it
    read_ahead: how many units' parameters, or states, are read before their turn; and how many states may be on their way back

    Example:
        policy = fsdp2.DiskOffloadPolicy(folder, read_ahead=1)
        fsdp2.fully_shard(net, offload_policy=policy)
        optimizer = fsdp2.optim.offloaded(torch.optim.AdamW, net, policy)
    """

    path: str | os.PathLike[str]
    read_ahead: int = 1


@dataclass(unsafe_hash=True)
class DataParallelMeshDims(_Frozen, getattr(torch_fsdp, "DataParallelMeshDims", object)):  # type: ignore[misc]  # torch has it from 2.12 on
    """Names of the axes of a full SPMD mesh that carry data parallelism.

    shard:      axis name or names over which parameters are sharded (several are flattened into one).
    replicate:  axis name or names over which they are replicated (several are flattened into one).
    Raises:     ArgumentError if both are None.

    Example:
        from torch.distributed.tensor import Replicate, distribute_module

        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        distribute_module(net, mesh, lambda name, module, mesh: None)  # every parameter: Replicate on both axes
        fsdp2.fully_shard(net, mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard="dp"))
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not (self.shard_names or self.replicate_names):
            from .errors import ArgumentError

            raise ArgumentError(
                "DataParallelMeshDims names no mesh axis",
                expected="at least one of shard and replicate must be set",
                fix='for instance DataParallelMeshDims(shard="dp")',
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn``: the dim on which to cut one parameter, and the ranks over which.

    placement:  Shard(dim); None is Shard(0).
    mesh_info:  a DeviceMesh (1-D: shard, 2-D: replicate and shard) instead of the one given to ``fully_shard``, so that, say,
                experts go over other ranks than the rest of their block; None: that one. torch's FSDPMeshInfo is accepted.

    Example:
        from torch.distributed.tensor import Shard

        result = fsdp2.ShardPlacementResult(Shard(0), mesh)
        fsdp2.fully_shard(net, shard_placement_fn=lambda param: result)
    """

    placement: Shard | None = None
    mesh_info: DeviceMesh | Any = None


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


class Comm(ABC):
    """A collective with a say in where its buffers live."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialized tensor of ``size`` (1-D) for one buffer of this collective."""


class AllGather(Comm):
    """A custom all-gather, for ``FSDPModule.set_custom_all_gather``.

    Example:
        class Gather(fsdp2.policy.AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


        model.set_custom_all_gather(Gather())
        model(x)
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (n,), which is this rank's slice of ``output_tensor`` (W * n,), from all ranks of ``group``."""


class ReduceScatter(Comm):
    """A custom reduce-scatter, for ``FSDPModule.set_custom_reduce_scatter``.

    Example:
        class Scatter(fsdp2.policy.ReduceScatter):
            def allocate(self, size, *, dtype, device):
                return torch.empty(size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
                return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


        model.set_custom_reduce_scatter(Scatter())
        model.set_force_sum_reduction_for_comms(True)  # gloo has no average
        model(x).sum().backward()
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (W * n,) over the ranks of ``group`` with ``op``; this rank's slice into ``output_tensor`` (n,)."""


_stock_alone = False


def set_collective_algorithms(algorithms: Literal["measured", "stock"]) -> None:
    """Choose the algorithms of later ``fully_shard`` calls, where fsdp2 has a choice: gloo on CPU.

    "measured" takes for each size the algorithm that measured fastest: broadcasts for an all-gather, all-to-all for a
    reduce-scatter.
    "stock" takes the backend's own, for tools that count: ``CommDebugMode`` and profilers then see one
    ``_allgather_base_`` and one ``_reduce_scatter_base_`` where torch's FSDP2 has one. The comparison of ranks before a
    backward is an ``allreduce_`` in any case.

    Collective: no; all ranks must choose the same.
    Raises:     ArgumentError for any other word

    Example:
        fsdp2.set_collective_algorithms("stock")
        fsdp2.fully_shard(net)
        fsdp2.set_collective_algorithms("measured")
    """
    global _stock_alone
    if algorithms not in ("measured", "stock"):
        raise ArgumentError(
            got("set_collective_algorithms", "algorithms", algorithms),
            expected='"measured" or "stock"',
            fix='for instance fsdp2.set_collective_algorithms("stock")',
        )
    _stock_alone = algorithms == "stock"


def is_stock_alone(device_type: str = "cpu") -> bool:
    """Whether the user wants the backend's own algorithms. gloo has no reduce-scatter of device memory."""
    return _stock_alone and device_type == "cpu"
