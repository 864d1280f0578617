"""State dicts of sharded modules: hooks show the sharded parameters before saving and loading.

torch refuses to copy a plain tensor into a DTensor. Here a state dict may have plain tensors of whole parameters, from
an unsharded model: each rank cuts its own pieces out. Nothing is communicated, so all ranks must pass the same values.

Worked example: a (5, 4) weight over 2 ranks; the state dict has a plain (5, 4) tensor, rank 1 loads its rows [3, 5)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...torch_names import torch_dtensors, torch_tensors
from ..group.own_memory import leaves_of
from ..group.param import ShardedParam, carry_grad_dtype, own_shard
from ..group.param_group import ParamGroup
from ..iteration.call import next_moment
from ..iteration.module_state import ModuleState
from ..iteration.unit import Unit
from ..plan.model_axes import own_piece
from ..plan.placement import in_dtype


class Saving:
    """Before saving, maybe on one rank alone: show the sharded parameters, because those are saved."""

    def __init__(self, unit: ModuleState) -> None:
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        schedule = self._unit.schedule
        if schedule is not None and schedule.forward is None:
            schedule.tree.refuse_lost_writes(self._unit.uses)
        self._unit.hide()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Saving:
        return self  # a copied unit registers its own hook


class Saved(Saving):
    """After saving: a write to the local tensor of a saved DTensor moves the version counter of the shard.

    ``detach`` of a DTensor gives its local tensor a counter of its own.
    """

    @torch.inference_mode(False)
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for _, param, name in _owned_by(module, self._unit):
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor) and _is_alias(torch_dtensors.local_tensor(value), param.local):
                torch_dtensors.set_local_tensor(value, param.local.detach())


def _is_alias(one: Tensor, other: Tensor) -> bool:
    """Whether they are two whole views of the same memory."""
    if one is other or type(one) is not type(other) or one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return [torch_tensors.storage_key(leaf) for leaf in leaves_of(one)] == [
        torch_tensors.storage_key(leaf) for leaf in leaves_of(other)
    ]


class Loading(Saving):
    """Before loading: values go into the sharded parameters, from whole tensors as well."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """state_dict: torch's own copy, so that the caller's stays"""
        self._unit.reshard_for_all()
        now = next_moment()
        owned = list(_owned_by(module, self._unit))
        for group in self._unit.uses:
            group.note_write(now, [param for its, param, name in owned if its is group and prefix + name in state_dict])
        for group, param, name in owned:
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor) or group.plan.has_own_memory:  # a subclass decides by itself what it takes
                continue
            if isinstance(value, Tensor) and value.shape == param.sharded.shape:
                state_dict[prefix + name] = cut_whole(param, value)


class Loaded(Saving):
    """After loading, which may have put other parameters into a module (``assign=True``): they keep ``grad_dtype``."""

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        for _, param, name in _owned_by(module, self._unit):
            now = module._parameters.get(name)
            if now is not None and now is not param.sharded:
                carry_grad_dtype(param.sharded, now)


def _owned_by(module: nn.Module, unit: Unit) -> Iterator[tuple[ParamGroup, ShardedParam, str]]:
    """The parameters of ``unit`` that ``module`` has, each with its group and its name there."""
    for group in unit.uses:
        for param in group.params:
            for owner in param.owners:
                if owner.module is module:
                    yield group, param, owner.name


@torch.no_grad()
def cut_whole(param: ShardedParam, whole: Tensor) -> Tensor:
    """A copy of this rank's piece of ``whole``, placed like the sharded parameter, in the dtype of ``whole``."""
    spec = param.spec
    whole = whole.detach()
    piece = whole if spec.unsharded is None else own_piece(whole, spec.unsharded)
    shard = spec.to_logical(own_shard(piece, spec, param.rank)).clone()  # ``assign`` must not keep the whole
    return torch_dtensors.new_dtensor(shard, in_dtype(spec.sharded, whole.dtype))
