"""How much CPU time does the host spend per module and step, over the plain model?

Fake process group of 8 or 64 ranks, parameters so small that arithmetic and copies vanish: what is left is Python, dispatch and
autograd. The fake group's all-gather copies the shard once for each rank, and its reduce-scatter cuts its input into a view for each
rank, which no real one does on the host: what that costs is measured by itself and taken off, the same for both. The time is that of
the main thread alone (``time.thread_time``; a CPU backward runs on it), forward and backward, divided by the number of blocks, the
root's own share included.
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


def work_of_fake_collectives(numel: int, dtype: torch.dtype, reduce_dtype: torch.dtype, world_size: int) -> float:
    """ms of a step that two all-gathers and a reduce-scatter of one module of ``numel`` elements take for being of many ranks."""

    def milliseconds(collective: Callable[[], object]) -> float:
        times = []
        for _ in range(200):
            begin = time.thread_time()
            collective()
            times.append(time.thread_time() - begin)
        return statistics.median(times) * 1e3

    def of(num_ranks: int, group: dist.ProcessGroup | None) -> float:
        shard = torch.zeros(-(-numel // world_size), dtype=dtype)
        gathered = torch.zeros(num_ranks * shard.numel(), dtype=dtype)
        reduced = torch.zeros(shard.numel(), dtype=reduce_dtype)
        unreduced = torch.zeros(num_ranks * shard.numel(), dtype=reduce_dtype)
        gather = milliseconds(lambda: dist.all_gather_into_tensor(gathered, shard, group=group))
        return 2 * gather + milliseconds(lambda: dist.reduce_scatter_tensor(reduced, unreduced, group=group))

    alone = dist.new_group([0])
    return max(of(world_size, None) - of(1, alone), 0.0)


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
        numel = models.numel_of(model) // num_blocks
        faked = work_of_fake_collectives(numel, dtype, torch.float32, case.world_size)
        overheads = {name: [value - faked for value in values] for name, values in common.over_plain(samples, num_blocks).items()}
        result = common.Result.of(
            "host_time",
            "host time over plain, per module and step",
            f"{case.params_per_block} parameters, {case.world_size} ranks{', mixed' if case.mixed else ''}",
            "ms",
            overheads,
            case.target,
            plain_ms_per_module=common.Spread.of(samples[common.PLAIN]).p50 / num_blocks,
            fake_collectives_ms_per_module=faked,
            num_blocks=num_blocks,
            world_size=case.world_size,
        )
        common.report(result, options.json)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
