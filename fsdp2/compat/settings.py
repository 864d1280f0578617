"""The arguments of a module's ``FSDP(...)`` call, kept next to its unit, and the values that were made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.plan.mesh import DataParallelMesh
from .api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)

_NAME = "_fsdp2_compat"


@dataclass(frozen=True)
class Options:
    """The arguments of ``FSDP(module, ...)`` under their own names, as they were passed."""

    process_group: Any = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Any = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None
    device_mesh: Any = None


@dataclass
class Settings:
    """The settings of one FSDP module.

    mesh:          over which its parameters are sharded and replicated
    is_root:       no FSDP call on a module above has been made
    state_dict:    what ``state_dict()`` returns
    buffer_dtypes: the dtypes that buffers had before they were cast, by name from the module
    has_comm_hook: ``register_comm_hook`` was called
    wrapped:       what ``module.module`` is, once somebody has asked for it
    """

    options: Options
    strategy: ShardingStrategy
    mesh: DataParallelMesh
    device: torch.device
    is_root: bool = True
    state_dict: StateDictSettings = field(
        default_factory=lambda: StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
    )
    buffer_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    has_comm_hook: bool = False
    wrapped: nn.Module | None = field(default=None, init=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return dataclasses.replace(self)  # of a copied module; process groups are shared


def settings_of(module: Any) -> Settings | None:
    """The settings of an FSDP module; None for other modules."""
    return getattr(module, "__dict__", {}).get(_NAME)


def give_settings(module: nn.Module, settings: Settings) -> None:
    module.__dict__[_NAME] = settings
