"""Parameters with memory of their own: the tensors that cannot be a piece of a flat shard, and how they are cut.

They are those with the all-gather hooks of ``extensions.py``, and tensor subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ExtensionError
from ...torch_names import torch_dtensors, torch_tensors
from ..plan.placement import ShardSpec

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def has_extension(local: Tensor) -> bool:
    return hasattr(local, PRE) or hasattr(local, POST)


def needs_own_memory(param: Tensor) -> bool:
    """Whether a parameter (the local tensor of a DTensor) cannot be a piece of a flat buffer."""
    local = torch_dtensors.local_of(param)
    return has_extension(local) or torch_tensors.is_traceable_wrapper_subclass(torch_dtensors.waited_for(local))


def leaves_of(local: Tensor) -> list[Tensor]:
    """The ordinary tensors that hold the memory of ``local``: itself, or those that a tensor subclass is made of.

    A subclass names them by ``__tensor_flatten__``. An all-gather extension need not have that method: in a wrapper
    without it, the tensors among its attributes count.
    """
    made_of: Any = local
    if torch_tensors.is_traceable_wrapper_subclass(made_of):
        names, _ = made_of.__tensor_flatten__()
        inner = [getattr(local, name) for name in names]
    elif torch_tensors.has_storage_of_its_own(local):
        return [local]
    else:
        inner = [value for value in vars(local).values() if isinstance(value, Tensor)]
    return [leaf for each in inner for leaf in leaves_of(each)]


def refuse_unextendable(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ExtensionError naming all parameters with half an extension, or of a kind that cannot be sharded."""
    found = []
    for name, param in params:
        local = torch_dtensors.local_of(param)
        problem = missing_half(local) or _refused_release(local)
        if problem is None and needs_own_memory(local):
            if local.ndim == 0:
                problem = "has no dim to cut"
            elif not local.is_contiguous():
                problem = f"is not contiguous but has strides {tuple(local.stride())}"
        if problem is not None:
            found.append(f"{name} {tuple(param.shape)} of type {type(local).__name__}: {problem}")
    if found:
        raise ExtensionError(
            f"{len(found)} parameters are tensors of a kind that cannot be sharded",
            items=found,
            expected=f"contiguous tensors with at least one dim, and with both {PRE} and {POST}, or neither",
            fix="change the tensor class, or pass them in ignored_params",
        )


def missing_half(local: Tensor) -> str | None:
    for one, other in ((PRE, POST), (POST, PRE)):
        if hasattr(local, one) and not hasattr(local, other):
            return f"has {one} but no {other}"
    return None


def _refused_release(local: Tensor) -> str | None:
    if not hasattr(local, RELEASE):
        return None
    if not has_extension(local):
        return f"has {RELEASE} but neither {PRE} nor {POST}"
    answer = getattr(local, RELEASE)()
    return None if isinstance(answer, bool) else f"{RELEASE} must return a bool, got {answer!r}"


def cut_out(name: str, whole: Tensor, spec: ShardSpec, rank: int) -> Tensor:
    """This rank's shard of ``whole``, of the same kind and with memory of its own (with room for the largest shard).

    It uses the operators of torch's FSDP2, which tensor subclasses implement: chunk, new_zeros, narrow from 0, copy_.
    Raises: ExtensionError if the subclass cannot do it.
    """
    cut = spec.cut
    shape = cut.shard_shape(rank)
    try:
        if cut.dim is None:
            shard = whole.new_zeros(cut.shape)
            shard.copy_(whole)
        else:
            chunks = torch.chunk(whole, cut.num_shards, dim=cut.dim)
            shard = whole.new_zeros(cut.shard_shape(0))
            if math.prod(shape) > 0:
                shard.narrow(cut.dim, 0, shape[cut.dim]).copy_(chunks[rank])
            shard = shard.narrow(cut.dim, 0, shape[cut.dim])
        if tuple(shard.shape) != shape:
            raise ValueError(f"torch.chunk, new_zeros and narrow led to the shape {tuple(shard.shape)}, not {shape}")
    except Exception as error:
        raise ExtensionError(
            f"{name} {tuple(whole.shape)} of type {type(whole).__name__} cannot be cut into {cut.num_shards} shards: "
            f"{type(error).__name__}: {error}",
            expected="a tensor subclass with torch.chunk, new_zeros, narrow and copy_ for these shapes",
            fix="choose shapes that divide, implement the operator, or pass the parameter in ignored_params",
        ) from error
    return shard
