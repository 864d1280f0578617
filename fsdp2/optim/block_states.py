"""Optimizer states that are quantised in blocks of so many elements, as torchao's: how they are read, and made of values.

Such a state is a tensor of its own class, which ``dequantize()`` reads and ``copy_`` writes. Not every such class can be cut at
parameters, so others see its values as ordinary tensors. This file refuses to know shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core import torch_compat as compat

QUANTISED_FROM_NUMEL = 4096
"""Smaller tensors keep whole states in torchao's optimizers and in bitsandbytes'."""


def block_of(optimizer: Optimizer) -> int:
    """Elements that ``optimizer`` quantises together; 1 if it quantises none. torchao's name, which other classes may use as well."""
    block = getattr(optimizer, "block_size", None)
    return block if isinstance(block, int) and block > 0 else 1


def is_quantised(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and compat.is_traceable_wrapper_subclass(value)


def values_of(value: Any) -> Any:
    """A quantised tensor as an ordinary one, a copy; anything else as it is."""
    return value.dequantize() if is_quantised(value) else value


def quantised(values: Mapping[str, Any], data: Tensor, new_optimizer: Callable[[nn.Parameter], Optimizer]) -> dict[str, Any]:
    """The state of ``data`` with ``values`` as an optimizer keeps it: a step on zeros shows which it quantises, and how.

    new_optimizer: of the kind that steps on ``data``, for the parameter that it is given
    Memory:        twice that of ``data``, and its state, for a moment
    """
    scratch = nn.Parameter(torch.zeros_like(data))
    scratch.grad = torch.zeros_like(data)
    maker = new_optimizer(scratch)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, for each shape
        compat.step_unheard(maker)
    found = dict(values)
    for key, made in maker.state[scratch].items():
        if is_quantised(made) and isinstance(values.get(key), Tensor):
            with torch.no_grad():
                found[key] = made.copy_(values[key])
    return found
