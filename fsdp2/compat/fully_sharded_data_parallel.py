"""``FullyShardedDataParallel`` as an FSDP1 script knows it, on our own core: the names of the torch module of the same name.

``FSDP(module, ...)`` shards ``module`` in place and returns it: it keeps its class (below a new one of the same name), its attributes
and the names of its parameters, which are DTensors between steps. ``isinstance(module, FSDP)`` is true, and ``module.module`` is the
same module as an object that is not an FSDP. A subclass of FSDP comes in front of the module's class, too:
``Mine(module)`` is ``module``, with the methods of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import ModuleError
from ..sharded_class import set_class
from ..torch_names.torch_modules import TorchFSDPModule
from . import api
from .api import *  # noqa: F403
from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .methods import FSDP1Module
from .settings import Options
from .wrap import CustomPolicy, ModuleWrapPolicy
from .wrapping import wrap_module


class _Wrapping(ABCMeta):
    """Makes ``FSDP(module, ...)`` return ``module``, and ``isinstance`` find all modules it was called on.

    It is an ABCMeta, so that a subclass can be put in front of a module's class that has that metaclass.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        _self, *others = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(others)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, TorchFSDPModule):  # type(module)(...), of a module that is sharded: ``FSDPModule.__new__`` makes a plain one
            return super().__call__(*args, **kwargs)
        made = object.__new__(cls)
        try:
            cls.__init__(made, *args, **kwargs)  # that of a subclass may build the module itself: only ours is sure to be given it
            module = _modules.get(id(made))
        finally:
            _modules.pop(id(made), None)
        if module is None:
            raise ModuleError(
                f"{cls.__name__}.__init__ did not call FullyShardedDataParallel.__init__",
                expected="super().__init__(module, ...), which shards the module",
                fix="call it with the module to shard",
            )
        return module

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (cls is FullyShardedDataParallel and isinstance(instance, FSDP1Module))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (cls is FullyShardedDataParallel and issubclass(subclass, FSDP1Module))


_modules: dict[int, nn.Module] = {}
"""The modules that ``FullyShardedDataParallel.__init__`` has sharded, by ``id`` of the instance that is being made."""


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
                        last iteration, and never more than that one.
    use_orig_params:    of no effect: parameters are always the original ones, DTensors between steps
    device_mesh:        instead of ``process_group``; for hybrid strategies 2-D (replicate, shard)
    Returns:            ``module``, for which ``isinstance(module, FSDP)`` is true
    Collective:         where process groups are made, and with ``sync_module_states``
    Raises:             an FSDPError that names argument and rank
    Source:             torch.distributed.fsdp.FullyShardedDataParallel; docs/fsdp1.md lists every difference
    """

    def __init__(
        self,
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
    ) -> None:
        given = locals()
        options = Options(**{each.name: given[each.name] for each in dataclasses.fields(Options)})
        if auto_wrap_policy is None:
            options = dataclasses.replace(options, auto_wrap_policy=fsdp_auto_wrap_policy)
        subclass = None if type(self) is FullyShardedDataParallel else type(self)
        wrap_module(module, options, subclass or FSDP1Module, FSDP1Module)
        # From here on ``self`` is the module: attributes that the __init__ of a subclass sets, before or after, are the module's.
        vars(module).update(vars(self))
        with contextlib.suppress(TypeError):  # the module's class lays out its instances otherwise: ``self`` then lacks its methods
            set_class(self, type(module))
        object.__setattr__(self, "__dict__", vars(module))
        _modules[id(self)] = module


__all__ = ["CustomPolicy", "FullyShardedDataParallel", "ModuleWrapPolicy"]
__all__ += api.__all__
