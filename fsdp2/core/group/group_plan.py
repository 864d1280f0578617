"""The plan of one group: where and how it runs, its dtypes, and where every shard lies in the flat shard.

Worked example, dtypes of gradients with torch 2.15's semantics: two bf16 parameters, no ``reduce_dtype``, the first
one's ``grad_dtype`` fp32

    reduced in fp32; the first one's gradient stays fp32, the other's is cast to bf16
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import ParameterError
from ...torch_names import torch_tensors
from ..comm import backends
from ..comm.streams import Streams
from ..plan.layout import Cut, GroupLayout, gather_plan, group_layout
from ..plan.mesh import DataParallelMesh
from .options import GroupOptions
from .own_memory import needs_own_memory
from .param import ShardedParam

ALIGN_NBYTES = (128, 64, 32, 16)
"""Views of flat buffers start at multiples of one of these: else kernels and collectives leave their fast paths.

A plan takes the first that makes buffers at most a tenth larger, else the last: small shards of many ranks would travel
with more padding than data."""

DIRECT_FROM_NBYTES = 128 << 10
DIRECT_FROM_SHARD_NBYTES = 2 << 10
"""Least sizes of the whole and of each rank's piece for a gather straight into place, if the backend gains by it.

A direct gather saves one copy of the whole, which must pay for one more collective; the piece is the message, which
must not become too small over many ranks."""


@dataclass(frozen=True)
class GradientDtypes:
    """The dtypes in which a group reduces, keeps and adds up gradients.

    reduced:  the dtype in which they are reduced
    kept:     the dtype of each sharded parameter's gradient; None: all have the parameters' own
    added_up: ``grad_dtype`` of those unsharded parameters for which the user has set one
    usual:    the dtype in which the other parameters add up gradients of backwards that do not reduce
    """

    reduced: torch.dtype
    kept: dict[ShardedParam, torch.dtype] | None
    added_up: dict[ShardedParam, torch_tensors.GradDtype]
    usual: torch.dtype

    def added_up_in(self, param: ShardedParam) -> torch.dtype | None:
        """The dtype in which gradients of ``param`` are added up; None: in the dtype that they have."""
        of_user = self.added_up.get(param)
        return self.usual if of_user is None else of_user.dtype

    def of_unsharded(self, param: ShardedParam, adds_up: bool) -> torch_tensors.GradDtype | None:
        """``grad_dtype`` of the unsharded parameter; None: its own dtype. adds_up: several backwards add up there."""
        return torch_tensors.GradDtype(self.added_up_in(param)) if adds_up else self.added_up.get(param)


def gradient_dtypes(
    params: Sequence[ShardedParam], options: GroupOptions, dtype: torch.dtype, param_dtype: torch.dtype
) -> GradientDtypes:
    """Read them from the parameters as they are now. dtype: of the shards; param_dtype: of the computation."""
    given = options.reduce_dtype
    if options.semantics == "2.13":
        return GradientDtypes(given or param_dtype, None, {}, given or param_dtype)
    of_user = {param: found for param in params if (found := torch_tensors.grad_dtype_of(param.sharded)) is not None}
    wanted = [given or (dtype if param not in of_user else of_user[param].dtype or param_dtype) for param in params]
    reduced = functools.reduce(torch.promote_types, wanted)
    kept = {param: (of_user[param].dtype or reduced) if param in of_user else dtype for param in params}
    return GradientDtypes(
        reduced,
        None if all(each is dtype for each in kept.values()) else kept,
        of_user if given is None else dict.fromkeys(of_user, torch_tensors.GradDtype(given)),
        given or dtype,
    )


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """The values that are fixed as long as a group's parameters are the same, of one dtype, in one kind of memory.

    device, streams: where it computes
    params:         the group's parameters; the first ``num_direct`` are gathered straight into place
    layout:         their slots in that order
    align:          every slot starts at a multiple of so many elements
    dtype:          of the shards
    param_dtype:    the dtype in which they are gathered and computed with
    gradients:      their dtypes
    is_meta:        some have no values yet
    has_own_memory: some define how they are gathered; then none lies in a flat shard
    """

    mesh: DataParallelMesh
    device: torch.device
    streams: Streams
    options: GroupOptions
    params: list[ShardedParam]
    num_direct: int
    layout: GroupLayout
    align: int
    dtype: torch.dtype
    param_dtype: torch.dtype
    gradients: GradientDtypes
    is_meta: bool
    has_own_memory: bool

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.gradients.reduced

    @property
    def unsharded_nbytes(self) -> int:
        return self.layout.unsharded_numel * self.param_dtype.itemsize


def plan_group(
    params: Sequence[ShardedParam],
    mesh: DataParallelMesh,
    device: torch.device,
    streams: Streams,
    options: GroupOptions,
) -> GroupPlan:
    """Plan for ``params`` as they are now.

    Raises: ParameterError naming the parameters if they have different dtypes
    """
    _refuse_mixed_dtypes(params)
    dtype = params[0].dtype
    wanted = options.param_dtype
    param_dtype = wanted if wanted is not None and dtype.is_floating_point else dtype
    gradients = gradient_dtypes(params, options, dtype, param_dtype)
    direct, packed = gather_plan(
        [param.spec.cut for param in params],
        mode=_gather_mode(mesh, options),
        direct_from_numel=direct_from_nbytes(mesh.shard_size) // param_dtype.itemsize,
    )
    # Matrices before vectors: an optimizer that decays only matrices then finds each kind in one stretch.
    packed.sort(key=lambda index: len(params[index].spec.cut.shape) <= 1)
    ordered = [params[index] for index in (*direct, *packed)]
    layout, align = _aligned_layout(
        [param.spec.cut for param in ordered],
        mesh.shard_size,
        min(each.itemsize for each in (dtype, param_dtype, gradients.reduced)),
        options.block,
    )
    locals_now = [param.local_now() for param in ordered]
    return GroupPlan(
        mesh=mesh,
        device=device,
        streams=streams,
        options=options,
        params=ordered,
        num_direct=len(direct),
        layout=layout,
        align=align,
        dtype=dtype,
        param_dtype=param_dtype,
        gradients=gradients,
        is_meta=any(local.is_meta for local in locals_now),
        has_own_memory=any(map(needs_own_memory, locals_now)),
    )


def direct_from_nbytes(num_shards: int) -> int:
    """The size from which a parameter cut over ``num_shards`` ranks is gathered straight into place."""
    return max(DIRECT_FROM_NBYTES, DIRECT_FROM_SHARD_NBYTES * num_shards)


def _aligned_layout(cuts: Sequence[Cut], num_shards: int, itemsize: int, block: int) -> tuple[GroupLayout, int]:
    """The layout of a flat shard, and the number of elements at whose multiples its slots start."""
    numel = sum(cut.slot_numel for cut in cuts)
    for nbytes in ALIGN_NBYTES:
        align = max(nbytes // itemsize, 1)
        layout = group_layout(cuts, num_shards=num_shards, align=align)
        if layout.shard_numel <= 1.1 * numel:
            break
    return group_layout(cuts, num_shards=num_shards, align=align, block=block), math.lcm(align, block)


def _gather_mode(mesh: DataParallelMesh, options: GroupOptions) -> str:
    if options.gather == "auto" and mesh.shard_group is not None:
        # Measured: on gloo direct gathers lose at every size (0.9x at 1 MB parameters, 0.35x at 16 KB).
        return "packed" if backends.is_gloo(backends.backend_of(mesh.shard_group, mesh.device_type)) else "auto"
    return options.gather


def have_mixed_dtypes(params: Sequence[ShardedParam]) -> bool:
    """Whether some of ``params`` were cast and others not."""
    return any(param.dtype is not params[0].dtype for param in params)


def _refuse_mixed_dtypes(params: Sequence[ShardedParam]) -> None:
    if have_mixed_dtypes(params):
        raise ParameterError(
            "parameters that fully_shard grouped by dtype have different ones now",
            items=[f"{param.fqn} {tuple(param.sharded.shape)} {param.dtype}" for param in params],
            expected="one dtype for the parameters of one group",
            fix="cast the whole module, or cast the part before fully_shard, which then gives it a group of its own",
        )
