"""How many Python functions are called per module and step, over the plain model?

The cause behind the host time, and unlike it the same number on every machine: ``call`` events of ``sys.setprofile`` during
forward and during backward, in a steady step (the fifth and later), same models as in ``host_time.py``. Calls of C functions
do not count. The count of one step is exact; more than one step is counted only to show that it is steady.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import common
import models
import torch
from torch import nn

TARGET = common.Target(0.20, 0.12)
FIRST_STEADY_STEP = 5


def calls_during(function: Callable[[], Any]) -> tuple[int, Any]:
    """Python calls made by ``function`` on this thread (itself included), and what it returned."""
    count = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "call":
            count += 1

    sys.setprofile(count_call)
    try:
        value = function()
    finally:
        sys.setprofile(None)
    return count, value


def calls_per_step(model: nn.Module, steps: int) -> tuple[list[float], list[float]]:
    """Calls in forward and in backward of each of ``steps`` steady steps."""
    x = torch.randn(2, 16, requires_grad=True)
    forward, backward = [], []
    for step in range(FIRST_STEADY_STEP + steps):
        model.zero_grad(set_to_none=True)
        calls_forward, loss = calls_during(lambda: model(x).sum())
        calls_backward, _ = calls_during(loss.backward)
        if step >= FIRST_STEADY_STEP:
            forward.append(float(calls_forward))
            backward.append(float(calls_backward))
    return forward, backward


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    num_blocks, steps = (8, 2) if options.quick else (16, 4)
    for params_per_block in (2, 12, 50):
        forward, backward, both = {}, {}, {}
        for name in options.implementations:
            model = models.tiny_stack(num_blocks, params_per_block)
            common.shard(model, model.blocks, name, mesh)
            forward[name], backward[name] = calls_per_step(model, steps)
            both[name] = [f + b for f, b in zip(forward[name], backward[name], strict=True)]
        phases = {
            phase: {name: common.Spread.of(calls).p50 for name, calls in common.over_plain(counts, num_blocks).items()}
            for phase, counts in (("forward", forward), ("backward", backward))
        }
        result = common.Result.of(
            "python_calls",
            "Python calls over plain, per module and step",
            f"{params_per_block} parameters",
            "calls",
            common.over_plain(both, num_blocks),
            TARGET,
            phases=phases,
            plain_calls_per_module=both[common.PLAIN][0] / num_blocks,
            num_blocks=num_blocks,
        )
        common.report(result, options.json)
        for phase, counts in phases.items():
            print(f"    {phase}: " + "  ".join(f"{name} {count:.1f}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
