"""Clip gradients by their total norm, on any mix of placements and meshes: parameters of one model need not share a mesh.

``torch.nn.utils.clip_grad_norm_`` stacks the norms as DTensors, which have to lie on one mesh, and its operator raises on an empty
shard where the norm has no identity (inf), on that rank alone. Here every rank computes what its local tensors contribute, one number
for all parameters that are cut over the same axes, and these vectors are all-reduced once for each mesh axis over which anything is
cut. Gradients that lie in one buffer are one tensor (``joined_gradients``).

Worked example, (dp 2, tp 2), 2-norm: weights cut over dp and tp, norms' scales cut over dp only, plain biases

    contributions     [9, 4, 1]     sums of the squares of the local tensors
    all-reduce, dp    [9, 4]        the gradients that are cut over dp, in one
    all-reduce, tp    [9]
    total             the square root of the sum; equal on all ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .core.comm import collective_log
from .core.group.param import as_sharded
from .errors import ArgumentError, got
from .hangs.joint_calls import joint
from .joined_gradients import forget_padding, joined
from .torch_names import torch_dtensors, torch_tensors


@joint
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters on any mixture of meshes and placements: scale gradients in place.

    parameters: DTensors (sharded evenly or not, replicated, partial) and plain tensors, with gradients or without. All ranks pass
                theirs in the same order. The unsharded parameters of a module stand for its sharded ones.
    max_norm:   the norm that all gradients together may have
    norm_type:  any number, "inf" or "-inf". As in torch, the norm of the parameters' norms: with 0, how many of them are not zero.
    foreach:    False computes one tensor after another
    Returns:    the norm before clipping: a plain 0-d tensor, fp32 (fp64 if a gradient is), on the first gradient's device, the same
                on every rank; torch returns a DTensor, whose ``full_tensor()`` is this norm. For a plain parameter each rank counts its
                own gradient.
    Collective: yes, over every mesh axis over which a parameter is cut; one all-reduce each, of a few numbers.
    Raises:     RuntimeError on all ranks if ``error_if_nonfinite`` and the norm is not finite; ArgumentError for a mesh without
                this rank, and for an argument of a wrong kind.

    Example:
        model(x).sum().backward()
        norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
        norm.item()
    """
    listed, order = _listed("clip_grad_norm_", "parameters", parameters), _order("clip_grad_norm_", norm_type)
    _check_max_norm(max_norm)
    params = as_sharded(listed)  # a root's may be unsharded at the moment; gradients belong to the sharded ones
    total, parts = total_norm([param.grad for param in params], params, order, foreach)
    if error_if_nonfinite:
        _refuse_nonfinite(total, norm_type)
    scale(parts, clip_coefficient(total, max_norm), foreach)
    return total


@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.get_total_norm`` for tensors on any mixture of meshes and placements; it changes none of them.

    tensors:    gradients or others, on any mesh; all ranks pass theirs in the same order
    Returns:    a plain 0-d tensor, fp32 (fp64 if a tensor is), the same on every rank. For a plain tensor each rank counts its own.
    Collective: yes, over every mesh axis over which a tensor is cut; one all-reduce each, of a few numbers.
    Raises:     as ``clip_grad_norm_``, whose other arguments these are

    Example:
        model(x).sum().backward()
        norm = fsdp2.get_total_norm([param.grad for param in model.parameters()])
    """
    listed, order = _listed("get_total_norm", "tensors", tensors), _order("get_total_norm", norm_type)
    total, _ = total_norm(listed, listed, order, foreach)
    if error_if_nonfinite:
        _refuse_nonfinite(total, norm_type)
    return total


def _listed(caller: str, argument: str, tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, str) or not isinstance(tensors, Iterable):
        raise ArgumentError(got(caller, argument, tensors), expected="a tensor, or several", fix="pass those of the model")
    listed = list(tensors)
    for each in listed:
        if not isinstance(each, Tensor):
            raise ArgumentError(
                f"{got(caller, argument, tensors)}, which has a {type(each).__name__}",
                expected="tensors alone",
                fix="pass model.parameters()",
            )
    return listed


def _check_max_norm(max_norm: Any) -> None:
    if not isinstance(max_norm, (Real, Tensor)):
        raise ArgumentError(got("clip_grad_norm_", "max_norm", max_norm), expected="a number", fix="pass for instance max_norm=1.0")


def _order(caller: str, norm_type: Any) -> float:
    try:
        return float(norm_type)
    except (TypeError, ValueError):
        raise ArgumentError(
            got(caller, "norm_type", norm_type), expected='a number, "inf" or "-inf"', fix="leave it out for the 2-norm"
        ) from None


def _refuse_nonfinite(total: Tensor, norm_type: float) -> None:
    if not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. "
            "To scale them by it anyway, pass error_if_nonfinite=False"
        )


# --- the norm -----------------------------------------------------------------------------------------------------------------


def total_norm(
    tensors: Sequence[Tensor | None], params: Sequence[Tensor], norm_type: float, foreach: bool | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The norm over ``tensors``, and plain tensors that have all their local elements: of gradients in one buffer, views of the buffer.

    params:     say over which axes ranks communicate where a tensor is missing; another rank may have it
    Collective: yes, see ``clip_grad_norm_``
    """
    likes = [param if tensor is None else tensor for tensor, param in zip(tensors, params, strict=True)]
    there = [tensor for tensor in tensors if tensor is not None]
    device = (there[0] if there else likes[0]).device if likes else None
    spreads = _spreads(likes)
    column_of, columns = _columns(spreads, each_alone=norm_type == 0)
    dense, kinds = there, column_of
    partial: list[Tensor] = []
    kinds_of_partial: list[int] = []
    if len(there) < len(likes) or True in [spread.is_partial for spread in spreads]:
        dense, kinds = [], []
        for tensor, spread, column in zip(tensors, spreads, column_of, strict=True):
            if tensor is not None:
                (partial if spread.is_partial else dense).append(tensor)
                (kinds_of_partial if spread.is_partial else kinds).append(column)
    locals_ = complete_locals(dense)
    if norm_type > 0:  # zeros between them do not count
        locals_, kinds = joined(locals_, kinds)
    wholes = complete_locals([_reduced(tensor) for tensor in partial])
    # A missing gradient has the dtype that it has on another rank: all send numbers of one dtype.
    missing = (
        []
        if len(there) == len(likes)
        else [_dtype_of_gradient(like) for like, each in zip(likes, tensors, strict=True) if each is None]
    )
    is_wide = any(dtype in _WIDE for dtype in (*(tensor.dtype for tensor in (*locals_, *wholes)), *missing))
    dtype = torch.float64 if is_wide else torch.float32
    terms = _terms([*locals_, *wholes], [*kinds, *kinds_of_partial], len(columns), norm_type, dtype, device, foreach)
    for process_group, device_type, indices in _groups(columns):
        terms = _all_reduce(terms, indices, process_group, device_type, norm_type)
    total = _join(terms, norm_type) if likes else terms.sum()
    if norm_type < 0 and not there:  # if no rank has an element, torch's norm is 0
        total = torch.where(total.isinf(), torch.zeros_like(total), total)
    return total, [*locals_, *complete_locals(partial)]


_WIDE = (torch.float64, torch.complex128)


def _dtype_of_gradient(param: Tensor) -> torch.dtype:
    chosen = torch_tensors.grad_dtype_of(param)
    return param.dtype if chosen is None or chosen.dtype is None else chosen.dtype


@dataclass(frozen=True)
class _Spread:
    """How tensors of one mesh and placements lie on ranks.

    cut_over:   the process groups of the axes that cut them, with the device type of each; ``names`` are theirs
    is_partial: they wait for a reduction
    """

    cut_over: tuple[tuple[dist.ProcessGroup, str], ...]
    names: tuple[str, ...]
    is_partial: bool


_PLAIN = _Spread((), (), is_partial=False)


def _spreads(likes: Sequence[Tensor]) -> list[_Spread]:
    """How ranks hold each tensor, found once for each mesh and placements: a model has many parameters, and few placements."""
    known: dict[tuple[int, Any], _Spread] = {}
    found: list[_Spread] = []
    last: torch_dtensors.DTensorSpec | None = None
    each = _PLAIN
    for like, spec in zip(likes, _specs_of(likes), strict=True):
        if spec is None:
            found.append(_PLAIN)
            continue
        if last is None or spec.mesh is not last.mesh or spec.placements != last.placements:
            last = spec
            key = id(spec.mesh), spec.placements
            each = known.get(key) or known.setdefault(key, _spread_over(like))
        found.append(each)
    return found


def _spread_over(like: Tensor) -> _Spread:
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    if mesh.get_coordinate() is None:
        raise ArgumentError(
            f"clip_grad_norm_ got a DTensor {tuple(like.shape)} on a mesh that this rank is not part of: {mesh}",
            expected="tensors that this rank has a piece of",
            fix="pass each rank the parameters of the meshes that it is in",
        )
    axes = [
        axis
        for axis, placement in enumerate(like.placements)
        if torch_dtensors.shard_dim(placement) is not None and mesh.size(axis) > 1
    ]
    groups = [mesh.get_group(axis) for axis in axes]
    return _Spread(
        cut_over=tuple((group, mesh.device_type) for group in groups),
        names=tuple(group.group_name for group in groups),
        is_partial=any(placement.is_partial() for placement in like.placements),
    )


def _columns(spreads: Sequence[_Spread], each_alone: bool) -> tuple[list[int], list[_Spread]]:
    """To which number each tensor contributes, and how each number's tensors are cut: one for all that are cut over the same axes.

    Equal on all ranks, as it depends on placements alone and not on which gradients a rank has.
    """
    if each_alone:
        return list(range(len(spreads))), list(spreads)
    columns: dict[tuple[str, ...], int] = {}
    firsts: list[_Spread] = []
    column_of = []
    for spread in spreads:
        column = columns.setdefault(spread.names, len(firsts))
        if column == len(firsts):
            firsts.append(spread)
        column_of.append(column)
    return column_of, firsts


def _groups(columns: Sequence[_Spread]) -> list[tuple[dist.ProcessGroup, str, list[int]]]:
    """The process group of each mesh axis over which something is cut, its device type, and the columns that are cut over it.

    In the order of first use. Groups of equal ranks are not merged: of two meshes some ranks may share a row and others not, and then
    ranks would add in different orders.
    """
    found: dict[str, tuple[dist.ProcessGroup, str, list[int]]] = {}
    for index, each in enumerate(columns):
        for process_group, device_type in each.cut_over:
            found.setdefault(process_group.group_name, (process_group, device_type, []))[2].append(index)
    return list(found.values())


def _reduced(tensor: Tensor) -> Tensor:
    """A partial DTensor after its reduction: a norm of sums is not made of norms of terms. Collective: yes."""
    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in tensor.placements])


def _terms(
    tensors: Sequence[Tensor],
    column_of: Sequence[int],
    num_columns: int,
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device | None,
    foreach: bool | None,
) -> Tensor:
    """(num_columns,): what the tensors of each column contribute, such that ranks' contributions can be added, or the largest taken.

    Finite norms: the sum of the powers (of norm 0: how many elements are not 0). Inf: the largest magnitude; -inf: minus the smallest.
    Where a column has no element here, what changes nothing.
    """
    is_infinite = math.isinf(norm_type)
    neutral = torch.full((), -math.inf if is_infinite else 0.0, dtype=dtype, device=device)
    by_column: list[list[Tensor]] = [[] for _ in range(num_columns)]
    for tensor, column in zip(tensors, column_of, strict=True):
        if tensor.numel() > 0:
            by_column[column].append(tensor)
    there = [tensor for each in by_column for tensor in each]
    if not there:
        return neutral.repeat(num_columns)
    found = torch.stack([norm.to(device=device, dtype=dtype) for norm in _norms(there, norm_type, dtype, foreach)])
    if is_infinite:
        found = found if norm_type > 0 else -found
    elif norm_type != 0:
        found = found**norm_type
    pieces = torch.split(found, [len(each) for each in by_column if each])
    terms = [piece.amax() if is_infinite else piece.sum() for piece in pieces]
    if len(terms) < num_columns:
        rest = iter(terms)  # not by a list of places: the host would wait until that is on the device
        terms = [next(rest) if each else neutral for each in by_column]
    return torch.stack(terms)


def _norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype, foreach: bool | None) -> Sequence[Tensor]:
    """Computed in ``dtype``, so that norms of fp16 gradients do not overflow and those of bf16 are not rounded."""
    if foreach is not False and not any(tensor.is_complex() for tensor in tensors):
        return torch._foreach_norm(tensors, norm_type, dtype)
    return [torch.linalg.vector_norm(tensor.abs() if tensor.is_complex() else tensor, norm_type, dtype=dtype) for tensor in tensors]


def _all_reduce(terms: Tensor, indices: list[int], process_group: dist.ProcessGroup, device_type: str, norm_type: float) -> Tensor:
    """``terms`` with those at ``indices`` replaced by those of all ranks of the group together. Collective: yes, one all-reduce."""
    each = None if len(indices) == len(terms) else terms.unbind()
    sent = terms if each is None else torch.stack([each[index] for index in indices])
    if math.isinf(norm_type):  # on some backends, the largest of numbers with a NaN among them is not NaN
        is_nan = sent.isnan()
        sent = torch.cat([sent.masked_fill(is_nan, -math.inf), is_nan.to(sent.dtype)])
    there = sent if terms.device.type == device_type else sent.to(device_type)  # gradients may be offloaded
    with collective_log.during("all-reduce of gradient norms", process_group, there):
        dist.all_reduce(there, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=process_group)
    sent = there.to(terms.device)
    if math.isinf(norm_type):
        largest, is_nan = sent.chunk(2)
        sent = largest.masked_fill(is_nan > 0, math.nan)
    if each is None:
        return sent
    reduced = dict(zip(indices, sent, strict=True))
    return torch.stack([reduced.get(index, term) for index, term in enumerate(each)])


def _join(terms: Tensor, norm_type: float) -> Tensor:
    if math.isinf(norm_type):
        largest = terms.amax()
        return largest.clamp(min=0) if norm_type > 0 else -largest
    if norm_type == 0:
        return torch.count_nonzero(terms).to(terms.dtype)
    return terms.sum() ** (1 / norm_type)


# --- scaling ------------------------------------------------------------------------------------------------------------------


def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    """() tensor, by which gradients of norm ``total`` are multiplied; 1 at most, without asking, which would wait for the device."""
    return (float(max_norm) / (total + 1e-6)).clamp(max=1.0)


def scale(tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None = None) -> None:
    """Multiply gradients in place by a () tensor."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, here in by_device.items():
        factor = coefficient.to(device)
        if foreach is False:
            for tensor in here:
                tensor.mul_(factor)
        else:
            torch._foreach_mul_(here, factor)
    forget_padding(tensors)  # NaN makes zeros NaN


def complete_locals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Replace DTensors by their local tensors, waited for; others stay. One call for all gradients of a model."""
    locals_ = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [local.wait() if isinstance(local, torch_dtensors.AsyncCollectiveTensor) else local for local in locals_]


def _specs_of(tensors: Sequence[Tensor]) -> list[torch_dtensors.DTensorSpec | None]:
    """Replace each DTensor by its spec. One call for all gradients of a model."""
    return [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]
