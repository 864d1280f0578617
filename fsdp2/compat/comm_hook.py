"""``register_comm_hook``: the user's function reduces gradients in place of our reduce-scatter or all-reduce."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.iteration.module_state import unit_of
from ..errors import ArgumentError, OrderError
from ..policy import ReduceScatter
from .api import ShardingStrategy
from .meshes import HYBRID
from .settings import settings_of


class _HookReduceScatter(ReduceScatter):
    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        self._state = state
        self._hook = hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._hook(self._state, input_tensor, output_tensor)
        return None


def register(root: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """See ``FullyShardedDataParallel.register_comm_hook``."""
    given: Any = hook
    if not callable(given):
        raise ArgumentError(
            f"register_comm_hook got {given!r}",
            expected="a function (state, gradient, shard), or (state, gradient) under NO_SHARD",
            fix="for instance torch.distributed.algorithms._comm_hooks.default_hooks.reduce_scatter_hook",
        )
    found = [(unit, settings) for each in root.modules() if (unit := unit_of(each)) and (settings := settings_of(each))]
    if any(settings.strategy in HYBRID for _, settings in found):
        raise ArgumentError(
            "register_comm_hook was called on a model with a hybrid sharding strategy",
            expected="FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
            fix="call set_custom_reduce_scatter or set_all_reduce_hook of the FSDP modules",
        )
    if any(settings.has_comm_hook for _, settings in found):
        raise OrderError(
            "register_comm_hook was called twice on a model",
            expected="one hook",
            fix="put both into one function",
        )
    for unit, settings in found:
        settings.has_comm_hook = True
        for group in unit.groups:
            gradients = group.gradients
            gradients.choose(divide_factor=1.0)  # the hook averages
            if settings.strategy is ShardingStrategy.NO_SHARD:
                gradients.choose(all_reduce_instead=functools.partial(hook, state))
            elif group.mesh.shard_size > 1:
                gradients.choose(comm=_HookReduceScatter(state, hook))
