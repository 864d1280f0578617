"""Is an optimizer element-wise: does each element of a parameter follow its own gradients alone, wherever it lies?

Nothing says that of a class, so it is tried: a few steps on two small matrices, and on one vector of the same elements.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError
from .arguments import made
from .block_states import block_of
from .torch_names import outside_of_modes, step_unheard

_NUM_STEPS = 3


@dataclass(frozen=True)
class Tried:
    """defaults: options that every group of parameters has. block: elements that are quantized together, 1 if none are."""

    defaults: dict[str, Any]
    block: int


def check_elementwise(optimizer_class: type[Optimizer], options: Mapping[str, Any], device: torch.device) -> Tried:
    """The result of a trial of ``optimizer_class`` with ``options``. States quantized in blocks are larger than the trial's.

    device: where to try it; one matrix has values a hundred times as large as the other, so that what mixes them shows
    Raises: ArgumentError if it refuses ``options``, or is not element-wise
    """
    with outside_of_modes():  # which may make tensors that have no values
        return _tried(optimizer_class, options, device)


def _tried(optimizer_class: type[Optimizer], options: Mapping[str, Any], device: torch.device) -> Tried:
    apart = [torch.linspace(-1, 1, 6, device=device).view(3, 2), torch.linspace(50, 100, 5, device=device).view(5, 1)]
    two = [nn.Parameter(each.clone()) for each in apart]
    one = [nn.Parameter(torch.cat([each.flatten() for each in apart]))]
    of_two = made(lambda: optimizer_class(two, **copy.deepcopy(dict(options))), optimizer_class.__name__, options)
    block = block_of(of_two)
    try:
        of_one = optimizer_class(one, **copy.deepcopy(dict(options)))
        # torchao compiles its step, for each shape: minutes.
        with contextlib.nullcontext() if block == 1 else torch.compiler.set_stance("force_eager"):
            for step in range(_NUM_STEPS):
                grads = [torch.sin(each * (step + 1)) * each.abs().max() for each in apart]
                for optimizer, params, given in ((of_two, two, grads), (of_one, one, [torch.cat([each.flatten() for each in grads])])):
                    for param, grad in zip(params, given, strict=True):
                        param.grad = grad.clone()
                    step_unheard(optimizer)
    except Exception as error:
        raise _refusal(optimizer_class, f"a step on a vector raises {type(error).__name__}: {error}") from error
    for key, value in of_one.state[one[0]].items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != one[0].shape:
            raise _refusal(
                optimizer_class, f"its state {key!r} has shape {tuple(value.shape)} for a parameter of {tuple(one[0].shape)}"
            )
    if not _are_equal(torch.cat([each.detach().flatten() for each in two]), one[0].detach()):
        raise _refusal(optimizer_class, "a step on two matrices and one on a vector of their elements give different values")
    return Tried(dict(of_two.defaults), block)


def _are_equal(apart: Tensor, together: Tensor) -> bool:
    """But for the rounding of kernels that take the last elements of a tensor another way."""
    return torch.allclose(apart, together, rtol=1e-5, atol=1e-6)


def _refusal(optimizer_class: type[Optimizer], reason: str) -> ArgumentError:
    return ArgumentError(
        f"{optimizer_class.__name__} is not element-wise: {reason}",
        expected="an optimizer whose update of an element depends on that element's gradients alone, as SGD's, Adam's or Lion's",
        fix=f"use {optimizer_class.__name__} itself on model.parameters()",
    )
