"""``state_dict`` and ``load_state_dict`` of FSDP modules, by the state dict type that is set for them.

FULL (the default, as in FSDP1): whole tensors, gathered one after another. SHARDED and LOCAL: the DTensors themselves. All of them
can be loaded under any type, since a value itself shows whether it is whole.

Each FSDP module converts the entries under its own prefix, so that it works below plain modules, too. The type decides for every
caller, ``torch.distributed.checkpoint.state_dict`` included; only ``fsdp2.checkpoint`` always gets DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.training_state import clean_name, wants_shards
from ..core.iteration.module_state import units_in
from ..errors import ArgumentError, ModuleError, got
from ..torch_names import torch_dtensors, torch_tensors
from .api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    member,
)
from .gather_and_cut import as_saved, cut_like, is_first_rank, local_part, sharded_params
from .settings import Settings, settings_of

State = dict[str, Any]

# --- which type ---------------------------------------------------------------------------------------------------------------

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def get_type(module: nn.Module) -> StateDictSettings:
    """The settings of the FSDP modules in the tree of ``module``.

    Raises: ModuleError if there are none, or they differ
    """
    found = [settings.state_dict for _, settings in fsdp_modules_of(module)]
    if any(each != found[0] for each in found):
        raise ModuleError(
            f"the FSDP modules in this {type(module).__name__} have different state dict settings",
            items=dict.fromkeys(map(repr, found)),
            expected="one setting for all of them",
            fix="call FSDP.set_state_dict_type on the module that holds them all",
        )
    return found[0]


def set_type(module: nn.Module, settings: StateDictSettings) -> StateDictSettings:
    """Set ``settings`` for all FSDP modules in the tree of ``module``; returns the earlier settings. Raises: as ``get_type``."""
    before = get_type(module)
    for _, each in fsdp_modules_of(module):
        each.state_dict = settings
    return before


def checked_settings(kind: Any, config: Any, optim_config: Any) -> StateDictSettings:
    """Raises: ArgumentError if a config is not of the type's class."""
    kind = member(StateDictType, kind, "state_dict_type")
    model_class, optim_class = _CONFIGS[kind]
    return StateDictSettings(
        kind,
        _checked_config(config, model_class, "state_dict_config", kind),
        _checked_config(optim_config, optim_class, "optim_state_dict_config", kind),
    )


def _checked_config(config: Any, wanted: type[Any], argument: str, kind: StateDictType) -> Any:
    if config is None:
        return wanted()
    if type(config).__name__ != wanted.__name__:
        raise ArgumentError(
            f"{got('FSDP', argument, config)} for {kind.name}",
            expected=f"a {wanted.__name__}, or None",
            fix=f"pass {wanted.__name__}(...)",
        )
    return wanted(**{each.name: getattr(config, each.name) for each in fields(wanted)})


def fsdp_modules_of(module: nn.Module) -> list[tuple[nn.Module, Settings]]:
    """The FSDP modules in the tree of ``module``, parents first. Raises: ModuleError if there are none."""
    found = [(below, settings) for below in module.modules() if (settings := settings_of(below)) is not None]
    if not found:
        raise ModuleError(
            f"there is no FSDP module in this {type(module).__name__}",
            expected="a module that FSDP was applied to, or one that holds such modules",
            fix="apply FSDP before",
        )
    return found


# --- saving -------------------------------------------------------------------------------------------------------------------


_Gathered = dict[int, tuple[Tensor, Tensor | None]]
"""By storage, the tensors gathered so far, with their sources, which keep the storage: tied parameters are gathered once on every rank,
and become one tensor.
"""

_gathered: ContextVar[_Gathered | None] = ContextVar("fsdp2_compat_gathered", default=None)
"""The tensors that the outermost ``state_dict()`` call has gathered so far."""


def state_dict_of(module: nn.Module, make: Callable[[], State], prefix: str) -> State:
    """The result of ``module.state_dict()``; ``make()`` gives that of its class, under ``prefix``.

    Collective: yes for FULL_STATE_DICT, over the meshes of the parameters
    Memory:     in addition to the result, one whole tensor
    """
    if wants_shards.get():
        return make()
    outer = _gathered.get()
    gathered: _Gathered = {} if outer is None else outer
    token = _gathered.set(gathered)
    try:
        state = make()
        _convert(module, state, prefix, gathered)
        return state
    finally:
        _gathered.reset(token)


def _convert(module: nn.Module, state: State, prefix: str, gathered: _Gathered) -> None:
    """Convert the entries of ``state`` under ``prefix`` to the state dict type of ``module``, in place."""
    settings = settings_of(module)
    assert settings is not None
    config = settings.state_dict.state_dict_config
    full = settings.state_dict.state_dict_type is StateDictType.FULL_STATE_DICT
    drop = full and getattr(config, "rank0_only", False) and not is_first_rank(settings.mesh)
    for key in [key for key in state if key.startswith(prefix)]:
        value = state[key]
        if isinstance(value, Tensor):
            dtype = settings.buffer_dtypes.get(clean_name(key[len(prefix) :]))
            if dtype is not None and value.dtype is not dtype:
                value = value.detach().to(dtype)
            state[key] = _converted(value, gathered, full, drop, config.offload_to_cpu)
        if drop:
            del state[key]


def _converted(value: Tensor, gathered: _Gathered, full: bool, drop: bool, to_cpu: bool) -> Any:
    if not isinstance(value, DTensor):
        return value.detach().cpu() if to_cpu and value.device.type != "cpu" else value
    if not full:
        return as_saved(value, full=False, to_cpu=to_cpu, drop=drop)
    local = torch_dtensors.local_tensor(value)
    key = torch_tensors.storage_key(local)
    if key not in gathered:
        gathered[key] = local, as_saved(value, full=True, to_cpu=to_cpu, drop=drop)
    return gathered[key][1]


# --- loading ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def place_for_loading(module: nn.Module, state: State, prefix: str) -> None:
    """Place DTensors under ``prefix`` as the parameters of ``module`` and below are, and take FSDP1's ShardedTensors. In place.

    Whole tensors are cut where they are loaded (``core/modules/state_dicts.py``). Values that fit nothing are left: ``nn.Module``
    reports them.
    Collective: only for DTensors placed otherwise
    """
    for unit in units_in(module.modules()):
        unit.reshard_for_all()
    cuts = sharded_params(module)
    params: dict[str, Any] = {clean_name(name): param for name, param in module.named_parameters(remove_duplicate=False)}
    for key in [key for key in state if key.startswith(prefix)]:
        param = params.get(clean_name(key[len(prefix) :]))
        value: Any = local_part(state[key])
        if not isinstance(param, DTensor):
            continue
        if isinstance(value, list):
            value = _from_shards(value, param)
            state[key] = state[key] if value is None else value
        elif isinstance(value, DTensor) and value.shape == param.shape:
            state[key] = cut_like(value, param, cuts.get(id(param)))


def _from_shards(shards: list[Tensor], param: DTensor) -> Tensor | None:
    """This rank's shard of one of FSDP1's ShardedTensors as a DTensor, if the same number of ranks saved it."""
    local = torch_dtensors.local_tensor(param)
    shard = shards[0] if shards else local.new_empty(local.shape)
    if len(shards) > 1 or shard.shape != local.shape:
        return None
    return torch_dtensors.new_dtensor(shard, torch_dtensors.spec_of(param))
