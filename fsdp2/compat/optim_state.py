"""Optimizer state in FSDP1's format: names of parameters as keys, whole tensors or DTensors; and back into a sharded optimizer.

    {"state": {"head.weight": {"step": tensor(3.), "exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": ["head.weight"]}]}

States that torch's FSDP1 wrote in this format are loaded as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..checkpoint.failures import failure
from ..checkpoint.training_state import clean_name, map_values, names_in, numbered_optimizer_state
from ..core.comm.collective_log import during
from ..core.group.param import ShardedParam
from ..core.iteration.module_state import units_in
from ..torch_names import torch_dtensors
from .api import OptimStateKeyType, StateDictSettings, StateDictType, member
from .gather_and_cut import as_saved, cut_like, is_first_rank, sharded_params
from .model_state import fsdp_modules_of

State = dict[str, Any]

# --- saving -------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_name(model: nn.Module, optim: Optimizer, raw: State | None, settings: StateDictSettings) -> State:
    """The optimizer's state by name. Collective: if it is to be whole, over the meshes of the parameters; one tensor at a time."""
    _reshard(model)
    config = settings.optim_state_dict_config
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    rank0_only = full and getattr(config, "rank0_only", False)
    drop = rank0_only and not is_first_rank(fsdp_modules_of(model)[0][1].mesh)
    raw = optim.state_dict() if raw is None else raw
    key_of: dict[str, Any] = {}
    groups = []
    for group, names in zip(raw["param_groups"], names_in(model, optim), strict=True):
        key_of.update(zip(names, group["params"], strict=True))
        groups.append(_with_params(group, names))
    state = {
        name: {what: _saved(value, full, config.offload_to_cpu, drop) for what, value in raw["state"][key].items()}
        for name, key in key_of.items()
        if key in raw["state"]
    }
    return {} if drop else {"state": state, "param_groups": groups}


def _saved(value: Any, full: bool, to_cpu: bool, drop: bool) -> Any:
    if isinstance(value, DTensor):
        return as_saved(value, full=full, to_cpu=to_cpu, drop=drop)
    if drop:
        return None
    if isinstance(value, Tensor):
        return value.detach().to("cpu" if to_cpu else value.device, copy=True)
    return copy.deepcopy(value)


def _reshard(model: nn.Module) -> None:
    """Let modules show the parameters that the optimizer has."""
    for unit in units_in(model.modules()):
        unit.reshard_for_all()


# --- loading ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sent:
    """Stands in place of a tensor that the first rank will broadcast."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def to_load(
    model: nn.Module,
    optim: Optimizer | None,
    state: State,
    *,
    optim_input: Any = None,
    from_first: bool = False,
    group: dist.ProcessGroup | None = None,
    named: bool = False,
) -> State:
    """What ``optim.load_state_dict`` takes, of a state by name (or of an unsharded optimizer's, by number).

    optim_input: the parameters or groups the optimizer was made of, if ``optim`` is None; both None: ``model.parameters()``
    from_first:  only the first rank of ``group`` (None: all ranks) has ``state``; tensors are broadcast one at a time
    named:       keys of the result are names
    Collective:  if ``from_first``, over ``group``; else only for DTensors placed otherwise than the parameters
    Raises:      CheckpointError on every rank, naming what does not fit
    """
    _reshard(model)
    names = names_in(model, optim) if optim is not None else _input_names(model, optim_input)
    params = {clean_name(name): param for name, param in model.named_parameters()}
    cuts = sharded_params(model)
    fetch: Callable[[Any], Any] = _as_is
    if from_first:
        device = fsdp_modules_of(model)[0][1].device
        state, fetch = _from_first(state, group, device)
    state = _with_names(state, names)
    groups = _fitting_groups(state, names)
    _refuse_unexpected(state, names, params)
    result: State = {
        "state": {
            name: {what: _loaded(what, fetch(value), params[name], cuts) for what, value in state["state"][name].items()}
            for name in state["state"]
        },
        "param_groups": groups,
    }
    return result if named else numbered_optimizer_state(result, names)


def _as_is(value: Any) -> Any:
    return value


@torch.no_grad()
def _loaded(what: str, value: Any, param: Tensor, cuts: dict[int, ShardedParam]) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if what == "step" or value.shape != param.shape or not isinstance(param, DTensor):
        return value.detach().clone()
    cut = cut_like(value, param, cuts.get(id(param)))
    assert isinstance(cut, DTensor)
    own = torch_dtensors.local_tensor(cut).to(torch_dtensors.local_tensor(param).device, copy=isinstance(value, DTensor))
    return torch_dtensors.new_dtensor(own, torch_dtensors.spec_of(cut))


def _with_names(state: State, names: list[list[str]]) -> State:
    """``state`` with names for keys: an unsharded optimizer's numbers are those of the same parameters in the same order."""
    if not state or "state" not in state or "param_groups" not in state:
        raise failure(
            f"the optimizer state has no {'state' if 'param_groups' in (state or {}) else 'param_groups'}",
            expected='{"state": ..., "param_groups": ...}, as FSDP.optim_state_dict returned it',
            fix="with rank0_only=True, rank 0 passes it; else every rank does",
        )
    keys = [key for group in state["param_groups"] for key in group["params"]]
    if all(isinstance(key, str) for key in (*keys, *state["state"])):
        return state
    flat = [name for group in names for name in group]
    if len(keys) != len(flat):
        raise failure(
            f"the optimizer state has {len(keys)} numbered parameters, and the optimizer {len(flat)}",
            expected="names for keys, or an unsharded optimizer's state over the same parameters in the same order",
            fix="convert it with FSDP.rekey_optim_state_dict and the unsharded model",
        )
    name_of = dict(zip(keys, flat, strict=True))
    return {
        "state": {name_of[key]: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [name_of[key] for key in group["params"]]} for group in state["param_groups"]],
    }


def _fitting_groups(state: State, names: list[list[str]]) -> list[State]:
    """The saved groups, with the parameters of the optimizer's groups in the optimizer's order."""
    saved = state["param_groups"]
    different = [] if len(saved) == len(names) else [f"{len(saved)} groups were saved, and the optimizer has {len(names)}"]
    for index, (group, own) in enumerate(zip(saved, names, strict=False)):
        theirs = {clean_name(name) for name in group["params"]}
        different += [f"param_groups[{index}]: {name} is the optimizer's alone" for name in own if name not in theirs]
        different += [f"param_groups[{index}]: {name} was saved alone" for name in sorted(theirs - set(own))]
    if different:
        raise failure(
            "the optimizer state has other parameter groups than the optimizer",
            items=different,
            expected="the same parameters in the same groups",
            fix="make the optimizer as it was made when the state was saved",
        )
    return [_with_params(group, own) for group, own in zip(saved, names, strict=True)]


def _with_params(group: State, names: list[str]) -> State:
    """A copy of a parameter group, with these names for its parameters."""
    return {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}), "params": names}


def _refuse_unexpected(state: State, names: list[list[str]], params: dict[str, Any]) -> None:
    known = {name for group in names for name in group}
    wrong = [f"{name} is not a parameter of the optimizer" for name in state["state"] if name not in known]
    for name, values in state["state"].items():
        if name not in known:
            continue
        shape = tuple(params[name].shape)
        wrong += [
            f"{name}: {what} {tuple(value.shape)}, and the parameter is {shape}"
            for what, value in values.items()
            if isinstance(value, (Tensor, _Sent)) and value.shape and _is_other(value, shape)
        ]
    if wrong:
        raise failure(
            f"{len(wrong)} entries of the optimizer state do not fit",
            items=wrong,
            expected="the state of this model's parameters",
            fix="load it into the model that it was saved from",
        )


def _is_other(value: Any, shape: tuple[int, ...]) -> bool:
    """It has the parameter's number of dims and other sizes; those of Adafactor and the like have fewer dims."""
    return len(value.shape) == len(shape) and tuple(value.shape) != shape


def _from_first(state: State, group: dist.ProcessGroup | None, device: torch.device) -> tuple[State, Callable[[Any], Any]]:
    """The state with ``_Sent`` for tensors, equal on all ranks, and how to get them, in order. Collective: yes, as is the function."""
    is_first = dist.get_rank(group) == 0
    tensors: list[Tensor] = []

    def without(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value.detach().cpu() if isinstance(value, Tensor) else value
        tensors.append(value)
        return _Sent(tuple(value.shape), value.dtype)

    sent = [map_values(without, state) if is_first else None]
    with during("broadcast of an optimizer's state", group):
        dist.broadcast_object_list(sent, group=group, group_src=0, device=device)
    remaining = iter(tensors)

    def fetch(value: Any) -> Any:
        if not isinstance(value, _Sent):
            return value
        buffer = next(remaining).to(device).contiguous() if is_first else torch.empty(value.shape, dtype=value.dtype, device=device)
        with during("broadcast of an optimizer's state", group, buffer):
            dist.broadcast(buffer, group=group, group_src=0)
        return buffer

    return sent[0] or {}, fetch


# --- keys ---------------------------------------------------------------------------------------------------------------------


def rekeyed(state: State, key_type: Any, model: nn.Module, optim_input: Any, optim: Optimizer | None) -> State:
    """The same state by name or by number. Raises: CheckpointError if keys are neither, or name no parameter."""
    wanted = member(OptimStateKeyType, key_type, "optim_state_key_type")
    kinds = {type(key) for key in state["state"]}
    if len(kinds) > 1 or not kinds <= {str, int}:
        raise failure(
            f"the optimizer state has keys of types {sorted(kind.__name__ for kind in kinds)}",
            expected="names only, or numbers only",
            fix="pass what full_optim_state_dict or optim.state_dict() returned",
        )
    if kinds <= {str if wanted is OptimStateKeyType.PARAM_NAME else int} and kinds:
        return state
    _reshard(model)
    names = names_in(model, optim) if optim is not None else _input_names(model, optim_input)
    state = _with_names(state, names)
    if wanted is OptimStateKeyType.PARAM_NAME:
        return state
    return numbered_optimizer_state({"state": state["state"], "param_groups": _fitting_groups(state, names)}, names)


def _input_names(model: nn.Module, optim_input: Any) -> list[list[str]]:
    """Names of the parameters that an optimizer was made of; ``optim_input`` has parameters, or groups of them."""
    given = list(model.parameters() if optim_input is None else optim_input)
    groups: list[Iterable[Tensor]] = [given]
    if given and isinstance(given[0], dict):
        groups = [[each["params"]] if isinstance(each["params"], Tensor) else each["params"] for each in given]
    known = {id(param): clean_name(name) for name, param in model.named_parameters()}
    try:
        return [[known[id(param)] for param in params] for params in groups]
    except KeyError:
        raise failure(
            "optim_input has parameters that are not the model's",
            expected="the model's parameters, or groups of them",
            fix="pass the optimizer as optim",
        ) from None
