"""A workload: how its model is made on the meta device, its inputs, and its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModuleError, got_object
from ..grouping.module_tree import refuse_lazy_parameters
from ..inspect import units


@dataclass(frozen=True)
class Workload:
    """inputs: from batch and sequence, what the model is called with; loss: from what it returns and what it was given

    repeated: the name of a ModuleList whose blocks forward runs one after another, however many there are; "": nobody promises that
    call:     how the model is called with its inputs
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]
    loss: Callable[[Any, tuple[Any, ...]], Tensor]
    repeated: str = ""
    call: Callable[[nn.Module, tuple[Any, ...]], Any] = lambda model, inputs: model(*inputs)


def tokens(batch: int, sequence: int) -> tuple[Any, ...]:
    """Token ids (batch, sequence)."""
    return (torch.zeros(batch, sequence, dtype=torch.long),)


def next_token_loss(output: Any, inputs: tuple[Any, ...]) -> Tensor:
    """Cross entropy in fp32 of logits, (batch, sequence, vocabulary), by themselves or as an attribute; of anything else the mean."""
    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, (tuple, list)) else logits
    targets = inputs[-1]
    if logits.ndim == 3 and isinstance(targets, Tensor) and targets.shape == logits.shape[:2]:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss: Tensor = logits.float().mean()
    return loss


def workload_of(
    model: Any,
    inputs: Callable[[int, int], tuple[Any, ...]] | None = None,
    loss: Callable[[Any, tuple[Any, ...]], Tensor] | None = None,
) -> Workload:
    """Of a module as it is, whose values are neither read nor changed: what is trained is a copy of it on the meta device.

    Raises: ModuleError if it is no module, or is sharded already; ParameterError for lazy ones
    """
    if not isinstance(model, nn.Module):
        raise ModuleError(
            got_object("plan", model), expected="an nn.Module, or the name of a shape", fix="see fsdp2 plan --help for the shapes"
        )
    if found := units(model):
        raise ModuleError(
            f"plan got a {type(model).__name__} that {found[0].made_by} has sharded already",
            expected="the model as it is before fully_shard: a plan shards a copy of it, for as many ranks as you ask for",
            fix="call plan before fully_shard, or fsdp2 plan train.py; fsdp2.summary(model) shows a sharded model",
        )
    refuse_lazy_parameters(model)
    return Workload(type(model).__name__, lambda: on_meta(model), inputs or tokens, loss or next_token_loss)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy without values."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
