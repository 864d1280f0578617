"""Optimizer states that are quantized in blocks of so many elements, as torchao's: how they are read, and made of values.

Such a state is a tensor of its own class, which ``dequantize()`` reads and ``copy_`` writes. Not every such class can be cut at
parameters, so others see its values as ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..torch_names import torch_tensors
from .torch_names import step_unheard

QUANTIZED_FROM_NUMEL = 4096
"""Smaller tensors keep whole states in torchao's optimizers and in bitsandbytes'."""


def block_of(optimizer: Optimizer) -> int:
    """Elements that ``optimizer`` quantizes together; 1 if it quantizes none. torchao's name, which other classes may use as well."""
    block = getattr(optimizer, "block_size", None)
    return block if isinstance(block, int) and block > 0 else 1


def is_quantized(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and torch_tensors.is_traceable_wrapper_subclass(value)


def values_of(value: Any) -> Any:
    """A quantized tensor as an ordinary one, a copy that quantizes to the same codes and scales; anything else as it is.

    That is ``dequantize()``, but for the largest element of a block: where its code stands for less than the scale, or the scale was
    rounded, the block would get a smaller scale, and so other codes. Within a rounding of a code, that element is what the scale says.
    """
    if not is_quantized(value):
        return value
    values: Tensor = value.dequantize()
    if isinstance(values, torch_tensors.FakeTensor):
        return values
    names, context = value.__tensor_flatten__()
    again = type(value).__tensor_unflatten__(
        {name: getattr(value, name).clone() for name in names}, context, value.shape, value.stride()
    )
    with torch.no_grad():
        for _ in range(_MOST_TRIES):
            again.copy_(values)
            changed = [_move_largest(values, getattr(value, name), getattr(again, name)) for name in names]
            if not any(changed):
                break
    return values


_MOST_TRIES = 6
"""One finds the scale but for its last bits, and each of the others moves it by a bit."""


def _move_largest(values: Tensor, wanted: Tensor, found: Tensor) -> bool:
    """Scale the largest element of each block of ``values`` whose scale is ``found`` and not as ``wanted``; False if all are.

    They may be any inner tensors of a quantized one: others than scales are not touched.
    """
    if not wanted.is_floating_point() or wanted.numel() == 0 or values.numel() % wanted.numel() or torch.equal(wanted, found):
        return False
    blocks, ratio = values.view(wanted.numel(), -1), (wanted.double() / found.double()).flatten()
    # Of two as large the negative one: codes that are not symmetric reach the scale itself with positive values.
    sizes = torch.where(blocks < 0, blocks.abs(), torch.nextafter(blocks.abs(), torch.zeros_like(blocks)))
    at = sizes.argmax(1, keepdim=True)
    largest = blocks.gather(1, at)
    moved = (largest * ratio[:, None]).to(values.dtype)
    outward = torch.nextafter(largest, largest.sign() * torch.inf)
    inward = torch.nextafter(largest, torch.zeros_like(largest))
    moved = torch.where(moved == largest, torch.where(ratio[:, None] > 1, outward, inward), moved)
    is_to_move = (ratio != 1) & ratio.isfinite() & (ratio > 0)
    blocks.scatter_(1, at, torch.where(is_to_move[:, None], moved, largest))
    return bool(is_to_move.any())


def quantized(values: Mapping[str, Any], data: Tensor, new_optimizer: Callable[[nn.Parameter], Optimizer]) -> dict[str, Any]:
    """The state of ``data`` with ``values`` as an optimizer keeps it: a step on zeros shows which it quantizes, and how.

    new_optimizer: of the kind that steps on ``data``, for the parameter that it is given
    Memory:        twice that of ``data``, and its state, for a moment
    """
    scratch = nn.Parameter(torch.zeros_like(data))
    scratch.grad = torch.zeros_like(data)
    maker = new_optimizer(scratch)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, for each shape
        step_unheard(maker)
    found = dict(values)
    for key, made in maker.state[scratch].items():
        if is_quantized(made) and isinstance(values.get(key), Tensor):
            with torch.no_grad():
                found[key] = made.copy_(values[key])
    return found
