"""Whole tensors in the state dict that ``load_state_dict`` was given: each rank cuts its own pieces out of them.

torch refuses to copy a plain tensor into a DTensor. Here a state dict may have a plain tensor with the parameter's whole shape, from an
unsharded model. Nothing is communicated, so all ranks have to pass the same values.

Worked example: a (5, 4) weight over 2 ranks; the state dict has a plain (5, 4) tensor, rank 1 loads its rows [3, 5)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import torch_compat as compat
from ..group.param import ShardedParam, own_shard
from ..iteration.unit import Unit
from ..plan.model_axes import own_piece
from ..plan.placement import in_dtype


def cut_whole_tensors(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the values for parameters that ``module`` owns. state_dict: torch's own copy, so that the caller's stays."""
    for group in unit.uses:
        if group.plan.has_own_memory:
            continue  # a tensor subclass decides by itself what it takes
        for param in group.params:
            for owner in param.owners:
                value = state_dict.get(prefix + owner.name) if owner.module is module else None
                if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.sharded.shape:
                    state_dict[prefix + owner.name] = cut_whole(param, value)


@torch.no_grad()
def cut_whole(param: ShardedParam, whole: Tensor) -> Tensor:
    """A copy of this rank's piece of ``whole``, placed like the sharded parameter, in the dtype of ``whole``."""
    spec = param.spec
    whole = whole.detach()
    piece = whole if spec.unsharded is None else own_piece(whole, spec.unsharded)
    shard = spec.to_logical(own_shard(piece, spec, param.rank)).clone()  # ``assign`` must not keep the whole
    return compat.new_dtensor(shard, in_dtype(spec.sharded, whole.dtype))
