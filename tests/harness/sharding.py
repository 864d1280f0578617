"""How most tests shard a model, and the copy that they compare it with.

model, reference = with_reference(mlp(), shard_blocks, after)
assert_trains_bitwise_as(model, reference, batches())  # see ``training.py``
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

import fsdp2
from harness.mesh import cpu_mesh


def shard_blocks(
    model: Any,
    reshard_after_forward: bool | int | None = None,
    *,
    mesh: Any = None,
    fully_shard: Callable[..., Any] = fsdp2.fully_shard,
    **options: Any,
) -> Any:
    """Shard each of ``model.blocks`` (of a list: each layer), then ``model``, in place."""
    options |= {"mesh": mesh or cpu_mesh(), "reshard_after_forward": reshard_after_forward}
    for block in getattr(model, "blocks", model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def with_reference(model: nn.Module, shard: Callable[..., Any] | None = None, *args: Any, **options: Any) -> tuple[Any, Any]:
    """``model`` after ``shard(model, *args, **options)``, which works in place, and a copy of it from before."""
    reference = copy.deepcopy(model)
    if shard is not None:
        shard(model, *args, **options)
    return model, reference
