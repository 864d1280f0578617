"""How much CPU time does the host spend per module and step, over the plain model?

Fake process group of 8 or 64 ranks, parameters so small that arithmetic and copies vanish: what is left is Python, dispatch and
autograd. The fake group's all-gather copies the shard once for each rank, which no real one does on the host: what that costs is
measured by itself and taken off, the same for both. The time is that of the main thread alone (``time.thread_time``; a CPU backward
runs on it), forward and backward, divided by the number of blocks, the root's own share included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import common
import models
import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Case:
    """mixed: bf16 parameters, gradients reduced in fp32."""

    params_per_block: int
    target: common.Target
    world_size: int = 8
    mixed: bool = False


CASES = [
    Case(2, common.Target(0.35, 0.25)),
    Case(12, common.Target(0.35, 0.25)),
    Case(12, common.Target(0.40, 0.30), mixed=True),
    Case(12, common.Target(0.43, 0.30), world_size=64),
    Case(50, common.Target(0.35, 0.25)),
]


def stepper(model: nn.Module, steps: int, dtype: torch.dtype) -> Callable[[], float]:
    """A function that trains ``steps`` steps and returns its thread time in ms per step."""
    x = torch.randn(2, 16, dtype=dtype, requires_grad=True)  # as from an embedding: every block's input needs a gradient
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


def copies_of_fake_gathers(numel: int, dtype: torch.dtype, world_size: int) -> float:
    """ms of a step for the copies in the fake group's two all-gathers of one module of ``numel`` elements."""

    def gather_ms(num_ranks: int, group: dist.ProcessGroup | None) -> float:
        shard = torch.zeros(-(-numel // world_size), dtype=dtype)
        gathered = torch.zeros(num_ranks * shard.numel(), dtype=dtype)
        times = []
        for _ in range(200):
            begin = time.thread_time()
            dist.all_gather_into_tensor(gathered, shard, group=group)
            times.append(time.thread_time() - begin)
        return statistics.median(times) * 1e3

    alone = dist.new_group([0])
    return 2 * max(gather_ms(world_size, None) - gather_ms(1, alone), 0.0)


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.start(options, __doc__)
    num_blocks, rounds, steps = (8, 12, 2) if options.quick else (16, 40, 2)
    for case in CASES:
        mesh = common.fake_mesh(case.world_size)
        functions = {}
        dtype = torch.bfloat16 if case.mixed else torch.float32
        for name in options.implementations:
            model = models.tiny_stack(num_blocks, case.params_per_block)
            functions[name] = stepper(common.shard(model, model.blocks, name, mesh, mixed=case.mixed), steps, dtype)
        samples = common.interleave(functions, rounds, warmup=3)
        copies = copies_of_fake_gathers(models.numel_of(model) // num_blocks, dtype, case.world_size)
        overheads = {name: [value - copies for value in values] for name, values in common.over_plain(samples, num_blocks).items()}
        result = common.Result.of(
            "host_time",
            "host time over plain, per module and step",
            f"{case.params_per_block} parameters, {case.world_size} ranks{', mixed' if case.mixed else ''}",
            "ms",
            overheads,
            case.target,
            plain_ms_per_module=common.Spread.of(samples[common.PLAIN]).p50 / num_blocks,
            fake_copies_ms_per_module=copies,
            num_blocks=num_blocks,
            world_size=case.world_size,
        )
        common.report(result, options.json)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
