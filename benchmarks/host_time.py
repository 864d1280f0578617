"""How much CPU time does the host spend per module and step, over the plain model?

Fake process group of 8 ranks, parameters so small that arithmetic and copies vanish: what is left is Python, dispatch and
autograd. The time is that of the main thread alone (``time.thread_time``; a CPU backward runs on it), forward and backward,
divided by the number of blocks, the root's own share included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import common
import models
import torch
from torch import nn

TARGET = common.Target(0.35, 0.25)


def stepper(model: nn.Module, steps: int) -> Callable[[], float]:
    """A function that trains ``steps`` steps and returns its thread time in ms per step."""
    x = torch.randn(2, 16, requires_grad=True)  # as from an embedding: every block's input needs a gradient
    parameters = list(model.parameters())

    def sample() -> float:
        spent = 0.0
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = None
            begin = time.thread_time()
            model(x).sum().backward()
            spent += time.thread_time() - begin
        return spent / steps * 1e3

    return sample


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    mesh = common.fake_mesh(8)
    num_blocks, rounds, steps = (8, 12, 2) if options.quick else (16, 40, 2)
    for params_per_block in (2, 12, 50):
        functions = {}
        for name in options.implementations:
            model = models.tiny_stack(num_blocks, params_per_block)
            functions[name] = stepper(common.shard(model, model.blocks, name, mesh), steps)
        samples = common.interleave(functions, rounds, warmup=3)
        overheads = common.over_plain(samples, num_blocks)
        result = common.Result.of(
            "host_time",
            "host time over plain, per module and step",
            f"{params_per_block} parameters",
            "ms",
            overheads,
            TARGET,
            plain_ms_per_module=common.Spread.of(samples[common.PLAIN]).p50 / num_blocks,
            num_blocks=num_blocks,
            world_size=8,
        )
        common.report(result, options.json)


if __name__ == "__main__":
    main()
