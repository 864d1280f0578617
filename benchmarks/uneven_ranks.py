"""What does a step cost that may be uneven, where all ranks do the same?

Two gloo processes train the same stack plainly, and in each way that allows ranks to differ. Counted per step on rank 0: Python
calls, operators (the kernels of a device), collectives with the host's messages, and what the step takes of the main thread's time
over the plain step of the same round. Counts are those of the step with the fewest; times are noisy on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import common
import models
import torch
import torch.distributed as dist
from python_calls import calls_during
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.inspect import Listener, listen

Step = Callable[[], Any]


class Counts(NamedTuple):
    calls: int
    operators: int
    collectives: int


class _Operators(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


class _Collectives(Listener):
    num = 0

    def issued(self, record: Any, owner: Any, num_ranks: int) -> None:
        self.num += 1


def plain(model: nn.Module, x: Tensor) -> Iterator[Step]:
    yield lambda: model(x).sum().backward()


def unused_guard(model: nn.Module, x: Tensor) -> Iterator[Step]:
    guard = fsdp2.guarded(model)
    with guard:
        model(x).sum().backward()
    yield from plain(model, x)


def guarded(model: nn.Module, x: Tensor) -> Iterator[Step]:
    guard = fsdp2.guarded(model)

    def step() -> None:
        with guard:
            model(x).sum().backward()

    yield step


def uneven(model: nn.Module, x: Tensor) -> Iterator[Step]:
    with fsdp2.uneven(model) as work:
        batches = work(itertools.repeat(x))
        yield lambda: work.backward(model(next(batches)).sum())
        work.stop()
        assert list(batches) == []


def optional(model: nn.Module, x: Tensor) -> Iterator[Step]:
    model.blocks[0].set_optional()  # type: ignore[index, union-attr, operator]
    yield from plain(model, x)


WAYS = {
    "plain": plain,
    "a guard, unused": unused_guard,
    "uneven, equal batches": uneven,
    "one optional unit, run": optional,
    "guarded": guarded,
}


def counted(step: Step) -> Counts:
    """Of the main thread, where a CPU's backward runs. Collective: yes"""
    gc.disable()  # finalizers are calls, too
    calls, _ = calls_during(step)
    gc.enable()
    collectives = _Collectives()
    undo = listen(collectives)
    with _Operators() as operators:
        step()
    undo()
    return Counts(calls, operators.num, collectives.num)


def timed(step: Step) -> Callable[[], float]:
    def sample() -> float:
        begin = time.thread_time()
        step()
        return (time.thread_time() - begin) * 1e3

    return sample


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", options.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,))
    num_blocks, rounds = (8, 12) if options.quick else (16, 40)
    x = torch.randn(2, 16, requires_grad=True)
    ways, steps = [], {}
    for name, way in WAYS.items():
        model = models.tiny_stack(num_blocks, 12)
        common.shard(model, model.blocks, common.OURS, mesh)
        ways.append(way(model, x))
        steps[name] = next(ways[-1])
    samples = common.interleave({name: timed(step) for name, step in steps.items()}, rounds, warmup=4)
    counts = {name: Counts(*map(min, zip(*(counted(step) for _ in range(9)), strict=True))) for name, step in steps.items()}
    for way in ways:
        list(way)
    over = common.over_plain(samples)
    if rank == 0:
        of_plain = counts["plain"]
        print(f"    plain: {of_plain}, {common.Spread.of(samples['plain']).p50:.2f} ms")
        for name, values in over.items():
            more = Counts(*(one - other for one, other in zip(counts[name], of_plain, strict=True)))
            result = common.Result.of(
                "uneven_ranks", "a step over the plain one", name, "ms", {common.OURS: values}, None, **more._asdict()
            )
            common.report(result, options.json)
            print(f"    {name}: {', '.join(f'{value:+} {key}' for key, value in more._asdict().items())}")
    dist.destroy_process_group()


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--world", type=int, default=2, help="number of processes")
    options = arguments.parse_args()
    common.start(options, __doc__)
    common.on_ranks(run_rank, options)


if __name__ == "__main__":
    main()
