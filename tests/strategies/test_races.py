"""Each strategy on recording streams: no read, write, allocation or free is unordered, and no number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, accumulate, parallelize
from fsdp2.strategy import STRATEGIES
from harness import on_ranks
from harness.models import batches, mlp
from harness.recording import recording
from harness.training import assert_same_bits, fed_own_chunk

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def two_micro_batches_and_an_evaluation(model: nn.Module, x: Tensor) -> Tensor:
    for index, part in enumerate(x.chunk(2)):
        with accumulate(model, last=index == 1):
            loss = model(part).square().mean()
            loss.backward()
        with torch.no_grad():
            model(part)
    return loss


def trained(strategy: str, options: dict[str, Any]) -> list[Any]:
    size = 2 if STRATEGIES[strategy].is_hybrid else None
    model = parallelize(mlp(), strategy, shard_size=size, **options)
    return fed_own_chunk(model, batches(3, (24, 7)), iteration=two_micro_batches_and_an_evaluation)


@on_ranks(4)
@pytest.mark.parametrize("options", [pytest.param(name, marks=[] if name == "bf16" else [pytest.mark.slow]) for name in OPTIONS])
@pytest.mark.parametrize("strategy", [each if each == "zero1" else pytest.param(each, marks=pytest.mark.slow) for each in STRATEGIES])
def test_no_race_in(strategy, options):
    expected = trained(strategy, OPTIONS[options])
    with recording():
        steps = trained(strategy, OPTIONS[options])
    assert_same_bits(steps, expected)
