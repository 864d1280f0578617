"""``FullyShardedDataParallel`` as an FSDP1 script knows it, on our own core: the names of the torch module of the same name.

``FSDP(module, ...)`` shards ``module`` in place and returns it: it keeps its class (below a new one), its attributes and the names of
its parameters, which are DTensors between steps. ``isinstance(module, FSDP)`` is true, ``module.module`` is the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import ModuleError, message
from .api import (
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .methods import FSDP1Module
from .settings import Options
from .wrap import CustomPolicy, ModuleWrapPolicy
from .wrapping import wrap_module


class _Wrapping(type):
    """Makes ``FSDP(module, ...)`` return ``module``, and ``isinstance`` find all modules it was called on."""

    def __call__(
        cls,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        fsdp_auto_wrap_policy: Any = None,
    ) -> Any:
        options = Options(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            auto_wrap_policy=fsdp_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
        )
        wrap_module(module, options, FSDP1Module)
        return module

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FSDP1Module)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, FSDP1Module)


class FullyShardedDataParallel(FSDP1Module, nn.Module, metaclass=_Wrapping):
    """FSDP1's class: ``FSDP(module, ...)`` shards ``module`` in place, over data-parallel ranks, and returns it.

    module:             a module, not a container without a forward. Wrap children before their parents.
    process_group:      the ranks; for hybrid strategies a pair (shard, replicate); None: all ranks, for hybrid ones by node
    sharding_strategy:  None is FULL_SHARD
    cpu_offload:        where sharded parameters and gradients live
    auto_wrap_policy:   which modules below are wrapped with the same arguments; see ``wrap``. ``fsdp_auto_wrap_policy`` is its name
                        in torch 1.11.
    backward_prefetch:  when backward gathers the next unit: before this one's gradients are computed (BACKWARD_PRE), after them
                        (BACKWARD_POST), or only when it is needed (None)
    mixed_precision:    dtypes, buffers included
    ignored_modules, ignored_states: modules or parameters to leave alone, at most one of the two arguments
    param_init_fn:      called on each module with tensors on the meta device; None: ``to_empty`` and ``reset_parameters``
    device_id:          where the module is moved; None: its own device, or the current accelerator, or the CPU
    sync_module_states: broadcast parameters and buffers from the first rank
    forward_prefetch, limit_all_gathers: of no effect. Forward always gathers the next unit while this one runs, in the order of the
                        last iteration, whatever that of this one is; and never more than that one.
    use_orig_params:    of no effect: parameters are always the original ones, DTensors between steps
    device_mesh:        instead of ``process_group``; for hybrid strategies 2-D (replicate, shard)
    Returns:            ``module``, for which ``isinstance(module, FSDP)`` is true
    Collective:         where process groups are made, and with ``sync_module_states``
    Raises:             an FSDPError that names argument and rank
    Source:             torch.distributed.fsdp.FullyShardedDataParallel; docs/fsdp1.md lists every difference
    """

    def __init_subclass__(cls, **kwargs: Any) -> NoReturn:
        raise ModuleError(
            message(
                f"{cls.__name__} subclasses FullyShardedDataParallel",
                expected="FSDP(module, ...): it is no wrapper, so there is nothing that a subclass could be an instance of",
                fix="subclass the module's own class, or write a function that calls FSDP",
            )
        )


__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
