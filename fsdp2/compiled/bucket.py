"""Groups that travel together in a captured graph: one all-gather in forward, one reduce-scatter in backward, written functionally.

``Bucket.unsharded`` is traced by the compiler: everything in it becomes nodes of the graph, which the compiler may fuse with what
uses the parameters. Its derivative is the reduction.

Worked example, 2 ranks, two groups whose flat shards have 64 and 32 elements, bf16 mixed precision with fp32 reduction:

    forward   cat of both in bf16 (96,) -> all-gather (192,) -> rows (2, 96) -> each parameter cut out of its columns
    backward  gradients laid into rows (2, 96 + flags) -> fp32 -> reduce-scatter -> / 2 -> one gradient for each group's landing
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm import backends, collectives
from ..core.comm.division import Division
from ..core.group.param import ShardedParam
from ..core.group.rank_pieces import assemble, disassemble
from ..core.plan.layout import Cut, Slot
from . import operators
from . import torch_names as compiler
from .stand_ins import Face, Landing


@dataclass(frozen=True)
class Member:
    """A group in a bucket. landing: None if none of its parameters is trainable."""

    face: Face
    landing: Landing | None


class Bucket:
    """One or more groups over the same ranks with the same dtypes.

    keep: backward finds the unsharded parameters saved; else it gathers them again
    used: for each member, the parameters of its landing's plan (by index) whose gradients the graph computes
    """

    def __init__(self, members: Sequence[Member], keep: bool) -> None:
        self.members = tuple(members)
        self.keep = keep
        group = members[0].face.group
        self.mesh = group.mesh
        self.param_dtype = group.plan.param_dtype
        self.reduce_dtype = group.plan.reduce_dtype
        self.divisions = group.gradients.divisions()
        self._options = group.options
        self.scatter_group = group.gradients.scatter_group
        self._gather_backend = backends.backend_of(group.mesh.shard_group, group.device.type)
        self._scatter_backend, _ = group.gradients.backends
        # Of groups that may be merged: what they must have in common.
        own = self.mesh.groups, id(self.scatter_group), self.param_dtype, self.reduce_dtype
        self.kind = (*own, keep, self.divisions)
        self.landings = tuple(member.landing for member in members if member.landing is not None)
        self.used: tuple[set[int], ...] = tuple(set() for _ in self.landings)

    @property
    def unsharded_nbytes(self) -> int:
        return sum(member.face.group.plan.layout.unsharded_numel for member in self.members) * self.param_dtype.itemsize

    @property
    def params(self) -> list[ShardedParam]:
        """The parameters of all members, in the order of ``unsharded``'s results."""
        return [param for member in self.members for param in member.face.group.params]

    def unsharded(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The unsharded parameters, differentiably.

        tensors:    the flat shard of each member, then the leaf of each landing
        Returns:    one tensor for each of ``params``, in param dtype, with its full shape
        Collective: yes, over the shard axis; its derivative over the shard, then the replicate axis
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() or bool(self.landings)):  # the user may have switched it off here
            return _Unshard.apply(self, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, flats: Sequence[Tensor]) -> list[Tensor]:
        pieces = [flat.to(self.param_dtype) for flat in flats]
        source = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        num_shards = self.mesh.shard_size
        if num_shards > 1:
            assert self.mesh.shard_group is not None
            source = operators.all_gather(source, self.mesh.shard_group, self._all_gather_algorithm(source))
        rows = source.view(num_shards, -1)
        whole = []
        start = 0
        for member in self.members:
            group = member.face.group
            for param, slot in zip(group.params, group.plan.layout.slots, strict=True):
                columns = rows[:, start + slot.offset : start + slot.offset + slot.numel]
                whole.append(param.spec.to_logical(_assembled(columns, slot.cut)))
            start += group.plan.layout.shard_numel
        return whole

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradient of each landing's leaf. grads: of what ``gather`` returned; None where the graph does not use a parameter."""
        of_param = dict(zip(map(id, self.params), grads, strict=True))
        pieces: list[Tensor] = []
        for landing, used in zip(self.landings, self.used, strict=True):
            plan = landing.plan
            found = [of_param[id(param)] for param in plan.params]
            used.clear()
            used.update(index for index, grad in enumerate(found) if grad is not None)
            pieces += self._laid_out(plan.params, plan.layout.slots, found)
        summed = torch.cat(pieces, dim=1).to(self.reduce_dtype).view(-1)
        scatter, all_reduce = self.divisions.reduce_scatter, self.divisions.all_reduce
        if self.mesh.shard_size > 1:
            assert self.scatter_group is not None
            collective = functools.partial(operators.reduce_scatter, algorithm=self._reduce_scatter_algorithm(summed))
            summed = _reduced(summed, scatter, collective, self.scatter_group)
        elif self.mesh.replicate_size == 1:
            summed = _divided(_divided(summed, scatter.predivide), scatter.postdivide)
        if self.mesh.replicate_size > 1:
            assert self.mesh.replicate_group is not None
            summed = _reduced(summed, all_reduce, compiler.functional_all_reduce, self.mesh.replicate_group)
        sizes = [landing.plan.layout.shard_numel for landing in self.landings]
        parts = [summed] if len(sizes) == 1 else torch.split(summed, sizes)
        return [part.to(landing.leaf.dtype) for part, landing in zip(parts, self.landings, strict=True)]

    def _all_gather_algorithm(self, shard: Tensor) -> backends.AllGatherAlgorithm:
        """As eager mode chooses, where there is an operator for it."""
        num_ranks, chosen = self.mesh.shard_size, self._options.all_gather
        if not _has_operators(shard):
            return "stock"
        return chosen or backends.choose_all_gather(self._gather_backend, num_ranks, num_ranks * shard.nbytes)

    def _reduce_scatter_algorithm(self, tensor: Tensor) -> backends.ReduceScatterAlgorithm:
        chosen = self._options.reduce_scatter
        if chosen == "all_reduce" or not _has_operators(tensor):
            return "stock"
        return chosen or backends.choose_reduce_scatter(self._scatter_backend, self.mesh.shard_size, tensor.nbytes)

    def _laid_out(self, params: Sequence[ShardedParam], slots: Sequence[Slot], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The columns of the reduce-scatter input, (num_shards, n) each: gradient, gap, ..., flags, gap."""
        num_shards = self.mesh.shard_size
        like = next(grad for grad in grads if grad is not None)

        def constant(numel: int, value: float) -> Tensor:
            return like.new_full((num_shards, numel), value, dtype=self.param_dtype)

        columns = []
        for param, slot, grad in zip(params, slots, grads, strict=False):
            if grad is None:
                columns.append(constant(slot.numel, 0))
            else:
                columns.append(disassemble(param.spec.to_physical(grad.to(self.param_dtype)), slot.cut))
            columns.append(constant(slot.gap, 0))
        columns += [constant(1, float(grad is not None)) for grad in grads]
        columns.append(constant(slots[-1].gap, 0))
        return [each for each in columns if each.shape[1] > 0]


class _Unshard(torch.autograd.Function):
    """``Bucket.gather`` with ``Bucket.reduce`` as its derivative."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        whole = bucket.gather(tensors[: len(bucket.members)])
        ctx.mark_non_differentiable(
            *(tensor for tensor, param in zip(whole, bucket.params, strict=True) if not param.sharded.requires_grad)
        )
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        bucket: Bucket = ctx.bucket
        return None, *[None] * len(bucket.members), *bucket.reduce(grads)


def _assembled(columns: Tensor, cut: Cut) -> Tensor:
    """The physical tensor of ``cut.shape`` out of the slots of all ranks, (num_shards, slot_numel)."""
    if cut.is_row_major:
        # A copy even of a single column, which could be a view: one saved for backward would keep the whole bucket.
        return columns.contiguous().view(-1)[: cut.numel].view(cut.shape)
    whole = columns.new_empty(cut.shape)
    assemble(columns, cut, whole)
    return whole


def _has_operators(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in collectives.SENDABLE


def _reduced(
    tensor: Tensor,
    division: Division,
    collective: Callable[[Tensor, str, dist.ProcessGroup], Tensor],
    process_group: dist.ProcessGroup,
) -> Tensor:
    operation = "avg" if division.op == dist.ReduceOp.AVG else "sum"
    result = collective(_divided(tensor, division.predivide), operation, process_group)
    return _divided(result, division.postdivide)


def _divided(tensor: Tensor, divisor: float | None) -> Tensor:
    return tensor if divisor is None else tensor / divisor
