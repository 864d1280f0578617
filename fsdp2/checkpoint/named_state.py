"""The state of a model and its optimizer by parameter name, sharded, as ``torch.distributed.checkpoint.state_dict`` lays it out.

Names carry no prefixes of wrappers. This file takes an optimizer's state as it is: torch's own ``get_optimizer_state_dict`` makes a
step of zero gradients if there is no state yet, after which Adam counts one step more than the run without a checkpoint.

    {"state": {"head.weight": {"step": tensor(3.), "exp_avg": DTensor}}, "param_groups": [{"lr": 0.1, "params": ["head.weight"]}]}
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from ..core import torch_compat as compat
from ..errors import CheckpointError, meta_error
from .failure import failure
from .model_tensors import WRAPPERS

State = dict[str, Any]

wants_shards: ContextVar[bool] = ContextVar("fsdp2_wants_shards", default=False)
"""True while ``named_model_state`` asks: modules that otherwise give whole tensors, as FSDP1's do, then give DTensors."""


def clean_name(name: str) -> str:
    """``name`` without the prefixes that activation checkpointing and the compiler add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_model_state(model: nn.Module) -> State:
    """``model.state_dict()`` under clean names: DTensors, nothing copied. Collective: no.

    Raises: MaterializationError if a part of it is still on the meta device
    """
    token = wants_shards.set(True)
    try:
        if next(model.parameters(), None) is None and not model.state_dict():
            return {}  # torch's refuses
        state: State = get_model_state_dict(model)
    finally:
        wants_shards.reset(token)
    on_meta = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_meta}
    if on_meta:
        devices = {value.device_mesh.device_type for value in on_meta.values() if hasattr(value, "device_mesh")}
        items = [f"{name} {tuple(value.shape)}" for name, value in on_meta.items()]
        raise meta_error(items, next(iter(devices), compat.default_device_type()))
    return state


def load_into(model: nn.Module, state: State) -> None:
    """The other way: the model loads what ``named_model_state`` gave. Collective: no."""
    if state:  # torch's refuses an empty one
        set_model_state_dict(model, state)


def put_back(model: nn.Module, state: State) -> None:
    """As ``load_into``, for a model whose own way of loading may just have failed: then its tensors at least get their values."""
    with contextlib.suppress(Exception):
        load_into(model, state)
    for name, tensor in named_model_state(model).items():
        if isinstance(tensor, Tensor):
            tensor.copy_(state[name])


def param_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by ``id``. Sharded modules show their sharded parameters: take a state dict before."""
    return {id(param): clean_name(name) for name, param in model.named_parameters()}


def names_in(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of each of the optimizer's groups.

    Raises: CheckpointError naming the places of parameters that are not the model's
    """
    known = param_names(model)
    groups = [group["params"] for group in optimizer.param_groups]
    foreign = [
        f"param_groups[{at}]['params'][{index}]: {type(param).__name__} {tuple(param.shape)}"
        for at, params in enumerate(groups)
        for index, param in enumerate(params)
        if id(param) not in known
    ]
    if foreign:
        raise _foreign_error(foreign)
    return [[known[id(param)] for param in params] for params in groups]


def _foreign_error(foreign: list[str]) -> CheckpointError:
    return failure(
        f"the optimizer has {len(foreign)} parameters that the model has not",
        items=foreign,
        expected="an optimizer over the model's parameters",
        fix="make the optimizer after fully_shard, of model.parameters()",
    )


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """``optimizer.state_dict()`` with names in place of numbers; nothing copied, no step taken. Collective: no."""
    names = names_in(model, optimizer)
    raw = optimizer.state_dict()
    name_of: dict[Any, str] = {}
    groups = []
    for group, named in zip(raw["param_groups"], names, strict=True):
        name_of.update(zip(group["params"], named, strict=True))
        groups.append(group | {"params": named})
    return {"state": {name_of[number]: dict(each) for number, each in raw["state"].items()}, "param_groups": groups}


def numbered_optimizer_state(state: State, names: list[list[str]]) -> State:
    """The argument of ``optimizer.load_state_dict`` for a result of ``named_optimizer_state``; ``names`` are the optimizer's."""
    number_of: dict[str, int] = {}
    groups = []
    for group, named in zip(state["param_groups"], names, strict=True):
        for name in named:
            number_of[name] = len(number_of)
        groups.append(group | {"params": [number_of[name] for name in named]})
    return {"state": {number_of[name]: each for name, each in state["state"].items()}, "param_groups": groups}


def map_values(change: Callable[[Any], Any], state: Any) -> Any:
    """``state`` with every leaf of its dicts and lists changed; tuples are leaves."""
    if isinstance(state, dict):
        return {key: map_values(change, value) for key, value in state.items()}
    if isinstance(state, list):
        return [map_values(change, value) for value in state]
    return change(state)
