"""How torch and other libraries recognize a sharded module: its class, its state, and the registries of both."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from . import torch_name

__all__ = ["TorchFSDPModule", "TorchUnshardHandle"]  # in addition to the names that are defined here

if TYPE_CHECKING:
    from torch.distributed._composable_state import _State

    class TorchGradientReductionHandle:
        """torch's class of the same name (2.15), so that ``isinstance`` checks elsewhere hold."""

else:
    _State = torch_name("torch.distributed._composable_state._State", object)  # torch does not find our states by type
    TorchGradientReductionHandle = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)

_torch_fsdp2 = torch_name("torch.distributed.fsdp._fully_shard._fully_shard", torch.distributed.fsdp)
# If these are gone, torch does not see our calls, or does not find our states.
_REGISTRY_KEY = torch_name("torch.distributed._composable.contract.REGISTRY_KEY", "_fsdp2_registry")
_STATE_KEY = torch_name("torch.distributed._composable.contract.STATE_KEY", "_fsdp2_states")
_RegistryItem = torch_name("torch.distributed._composable.contract.RegistryItem", object)
_insert_module_state = torch_name("torch.distributed._composable_state._insert_module_state", lambda module, state: None)


def applied_apis(module: nn.Module) -> list[str]:
    """Names of the composable APIs applied to ``module``: "fully_shard", "replicate", ..."""
    return list(module.__dict__.get(_REGISTRY_KEY) or ())  # not getattr: a wrapper's leads to the module that it wraps


class ModuleStateBase(_State):
    """Base of our per-module state, so that torch's look-ups by type find it.

    Pipeline schedules use private names of FSDP2's state to reduce what their micro-batches accumulated: first each
    group, and we show none, then at the end of backward.
    """

    _state_ctx = types.SimpleNamespace(all_states=())

    def reduce_accumulated(self) -> None:
        """Do what the end of a backward with gradient sync does."""
        raise NotImplementedError

    def shared_context(self) -> object:
        """The same for roots that share their communication."""
        raise NotImplementedError

    @property
    def _comm_ctx(self) -> object:
        return self.shared_context()

    def _root_post_backward_final_callback(self) -> None:
        self.reduce_accumulated()


_STATE_OWNER = unwrap(_torch_fsdp2.fully_shard)
"""The key under which torch's ``fully_shard.state`` looks up a module's state: the function inside torch's decorator.

Read here, once: other libraries replace ``torch.distributed.fsdp.fully_shard``, and some don't tell what they wrap.
"""


def register_module_state(module: nn.Module, state: ModuleStateBase) -> None:
    """Make ``state`` what ``torch.distributed.fsdp.fully_shard.state(module)`` and torch's registries report."""
    registry = module.__dict__.setdefault(_REGISTRY_KEY, {})
    registry["fully_shard"] = _RegistryItem()
    states = module.__dict__.setdefault(_STATE_KEY, {})
    states[_STATE_OWNER] = state
    _insert_module_state(module, state)


@contextlib.contextmanager
def without_module_state(module: nn.Module) -> Iterator[None]:
    """Inside, ``module.__dict__`` has nothing of what ``register_module_state`` put there."""
    places = [
        (module.__dict__[_REGISTRY_KEY], "fully_shard"),
        (module.__dict__[_STATE_KEY], _STATE_OWNER),
    ]
    kept = [place.pop(key) for place, key in places]
    try:
        yield
    finally:
        for (place, key), value in zip(places, kept, strict=True):
            place[key] = value


def torch_mixin() -> type:
    """torch's FSDPModule, or the subclass that somebody has put where torch's ``fully_shard`` looks it up."""
    there: Any = _torch_fsdp2.FSDPModule
    return there if isinstance(there, type) and issubclass(there, TorchFSDPModule) else TorchFSDPModule


def let_guard_pickler_find(cls: type, new: type) -> None:
    """Enter ``new`` as the FSDP class of ``cls`` if guards are pickled (``torch._dynamo.config.caching_precompile``).

    Not otherwise: torch's own fully_shard takes its classes from the same map, and would give its modules our methods.
    """
    config = sys.modules.get("torch._dynamo.config")
    wanted = config.caching_precompile if config is not None else os.environ.get("TORCH_CACHING_PRECOMPILE") == "1"
    if wanted:
        _torch_fsdp2.cls_to_fsdp_cls.setdefault(cls, new)


def module_state(module: nn.Module) -> ModuleStateBase | None:
    """The state that ``register_module_state`` stored, or None."""
    state = module.__dict__.get(_STATE_KEY)
    if state is None:
        return None
    found = state.get(_STATE_OWNER)
    return found if isinstance(found, ModuleStateBase) else None
