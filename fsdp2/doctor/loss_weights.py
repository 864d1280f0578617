"""How much does each token's loss count in a step? Backward hands torch's loss functions the weight of what they returned.

A mean that backward multiplies by g gives each of its tokens the weight g / tokens. Over all micro-batches, and all data-parallel
ranks, whose gradients are divided by their number, the weights of all tokens should add up to 1.

Worked example, 2 ranks, 2 micro-batches of 4 tokens, gradients divided by 2:

    loss / 2 each                  4 means of weight 1/2, divided by 2: 1
    not divided                    4 means of weight 1, divided by 2: 2, the number of micro-batches
    one has 3 tokens of padding    its only token weighs 1/2, the others 1/8
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inspect import Group
from .finding import Finding

_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Heard:
    """One loss in one backward. weight: of its mean; count: of its tokens"""

    weight: float
    count: int


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(F, name))


def listen_to(name: str, args: Any, kwargs: Any, loss: Tensor, heard: list[Heard | None]) -> Iterator[Finding]:
    """Note in ``heard`` what backward does with a loss that a function of torch returned. None: its weight tells nothing"""
    bound = _signature(name).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    scores, target = given["input"], given["target"]
    is_cast = torch.is_autocast_enabled(scores.device.type)
    if name in ("cross_entropy", "nll_loss") and scores.dtype in (torch.bfloat16, torch.float16) and not is_cast:
        yield _in_low_precision(name, scores.dtype)
    if not loss.requires_grad or given["reduction"] not in ("mean", "sum"):
        return
    count = target.numel() if target.is_floating_point() else int((target != given.get("ignore_index")).sum())
    is_plain = given.get("weight") is None and given.get("pos_weight") is None and loss.dim() == 0

    def note(grad: Tensor) -> None:
        weight = abs(grad.item()) * (count if given["reduction"] == "sum" else 1)
        heard.append(Heard(weight, count) if is_plain else None)

    loss.register_hook(note)  # type: ignore[no-untyped-call]


def scale_of(by_rank: Sequence[Sequence[Heard]], factor: float, accumulates: bool) -> Iterator[Finding]:
    """by_rank: means of a step; factor: the divisor of gradients; accumulates: of micro-batches"""
    total = sum(each.weight for heard in by_rank for each in heard) / factor
    if not math.isfinite(total):  # the check for finite losses says so
        return
    number, most = round(total), max(map(len, by_rank))
    if accumulates and 2 <= number <= most and abs(total - number) < _TOLERANCE:
        what, fix = (
            f"{most} micro-batches",
            "divide each loss by the number of micro-batches before backward, and call backward once on each",
        )
    elif len(by_rank) > 2 and abs(total * len(by_rank) - 1) < _TOLERANCE:
        what, fix = f"{len(by_rank)} ranks", "leave out the division by the ranks: backward averages over them"
    elif factor != len(by_rank) and abs(total / len(by_rank) - 1) < _TOLERANCE:
        what = f"{len(by_rank)} ranks, whose gradients are divided by {factor:g}"
        fix = "leave out set_gradient_divide_factor, or divide the loss by the tokens of all ranks"
    else:
        return
    yield Finding(
        "gradient-scale",
        "warning",
        f"the mean losses of a step weigh {total:.3g} in sum, and not 1, over {what}",
        f"gradients are {total:.3g} times those of the mean over all tokens: the step depends on how the batch is spread over "
        "micro-batches and ranks",
        fix,
    )


def token_weights(lowest: str, highest: str) -> Finding:
    return Finding(
        "token-weights",
        "warning",
        f"tokens weigh from {lowest} to {highest} in the loss",
        "ranks or micro-batches with fewer tokens count more for each: the step depends on how tokens are spread",
        "divide the sum of losses by the tokens of all ranks and micro-batches, times the ranks that fully_shard averages over; "
        "weights that are meant: ignore this",
    )


def uneven(by_rank: Mapping[int, Sequence[Heard]], accumulates: bool) -> Iterator[Finding]:
    """by_rank: the losses of one step; accumulates: they are of micro-batches, and else may be of tasks with weights of their own"""
    together = [(rank, 0 if accumulates else number, each) for rank, heard in by_rank.items() for number, each in enumerate(heard)]
    for task in {number: None for _, number, _ in together}:
        per_token = {each.weight / each.count: rank for rank, number, each in together if number == task and each.count}
        lowest, highest = min(per_token, default=0.0), max(per_token, default=0.0)
        if highest <= lowest * (1 + _TOLERANCE):
            continue
        yield token_weights(f"{lowest:.4g} on rank {per_token[lowest]}", f"{highest:.4g} on rank {per_token[highest]}")
        return


def factors_differ(groups: Sequence[Group]) -> Iterator[Finding]:
    """Parameters over the same ranks whose gradients are divided by different numbers; and those over fewer, divided by these alone."""
    everyone = max((group.ranks for group in groups), key=len, default=frozenset[int]())
    usual = max((_factor(group) for group in groups if group.ranks == everyone), default=0.0)
    for group in groups:
        factor = _factor(group)
        if factor == usual or not group.ranks <= everyone or (group.ranks != everyone and group.divide_factor() is not None):
            continue
        if any(param.sharded.requires_grad for param in group.params):
            yield Finding(
                "gradient-scale",
                "warning",
                f"the gradients of {group.name or 'the root'} are divided by {factor:g}, and those of the other modules by {usual:g}",
                f"they train with {usual / factor:.3g} times the gradients of the rest, and clipping scales all by their norm",
                f"call set_gradient_divide_factor({usual:g}) on experts, whose gradients have the tokens of other ranks as well; "
                "on modules over the same ranks leave it out",
                tuple(param.fqn for param in group.params),
            )


def _factor(group: Group) -> float:
    return float(group.divide_factor() or len(group.ranks))


def _in_low_precision(name: str, dtype: torch.dtype) -> Finding:
    kind = str(dtype).removeprefix("torch.")
    return Finding(
        "low-precision-loss",
        "warning",
        f"{name} gets scores in {kind}",
        f"the probabilities and the loss have three digits or less, and gradients of scores begin in {kind}",
        "cast them first: F.cross_entropy(logits.float(), ...), or MixedPrecisionPolicy(output_dtype=torch.float32)",
    )
