"""Which modules have what autograd saves in them on the host until backward asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..arguments import NATURAL, SWITCH, require
from ..errors import ModuleError
from ..torch_names import torch_autograd, torch_compiler
from .around_forward import around_forward, put_around_forward
from .on_host import Call, HostMemory
from .policy import chosen_modules, is_below


def apply_activation_offload(
    model: nn.Module,
    modules: Any = "auto",
    *,
    max_nbytes: int | None = None,
    min_nbytes: int = 1 << 20,
    pin_memory: bool = True,
) -> list[str]:
    """Let what autograd saves in the forward of modules of ``model`` be in host memory until backward needs it.

    Copies run on a stream of their own: out while the next modules run, back while backward is at the module after. What the last
    module saves stays, for backward asks for it at once; and parameters stay. Before or after ``fully_shard``, ``compile`` and
    ``apply_activation_checkpointing``; of a checkpointed module its inputs are what is saved. On the CPU the host keeps copies.

    modules:    "auto" (the repeated blocks), classes, or a policy of ``fsdp2.wrap``
    max_nbytes: bytes of host memory that this rank may use at a time; what comes first in forward goes there, the rest stays
    min_nbytes: smaller storages stay
    pin_memory: page-locked host memory; without it a copy out makes the host wait for the device
    Returns:    the names of the modules
    Collective: no
    Raises:     ModuleError for modules that are offloaded already, or one inside of the other; ArgumentError
    Source:     ZeRO-Infinity (Rajbhandari et al. 2021), section 5.1.1

    Example:
        fsdp2.apply_activation_offload(model, max_nbytes=16 << 30)
        model(x).sum().backward()
    """
    require("apply_activation_offload", NATURAL.or_none, max_nbytes=max_nbytes)
    require("apply_activation_offload", NATURAL, min_nbytes=min_nbytes)
    require("apply_activation_offload", SWITCH, pin_memory=pin_memory)
    chosen = chosen_modules("apply_activation_offload", model, modules)
    _refuse_twice(model, chosen)
    offload = _Offload(HostMemory(max_nbytes, min_nbytes, pin_memory))
    for module in chosen.values():
        put_around_forward(module, outer=offload)
    return list(chosen)


class _Offload:
    """Runs around the forwards of all modules that share the host memory."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory

    @torch_compiler.dynamo_skips
    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._begin(module)
        if call is None:
            return forward(*args, **kwargs)
        with saved_tensors_hooks(call.pack, call.unpack):
            return forward(*args, **kwargs)

    @torch_compiler.dynamo_disabled
    def _begin(self, module: nn.Module) -> Call | None:
        """None if no backward follows, or if one runs already: it needs at once what a recomputation saves."""
        return self.memory.begin(module) if torch.is_grad_enabled() and torch_autograd.current_graph_task() == -1 else None


def _refuse_twice(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Raise ModuleError if what one module saves would go to the host twice."""
    taken = {name for name, module in model.named_modules() if around_forward(module).outer is not None}
    twice = [f"{name}: it is offloaded already" for name in chosen if name in taken]
    for name in chosen:
        twice += [f"{name}: it is inside of {other}, which is offloaded too" for other in {*taken, *chosen} if is_below(name, other)]
    for name in taken:
        twice += [f"{other}: {name}, which is inside of it, is offloaded already" for other in chosen if is_below(name, other)]
    if twice:
        raise ModuleError(
            "apply_activation_offload would send what modules save to the host twice",
            items=twice,
            expected="no module that is offloaded inside of another",
            fix="choose other modules",
        )
