"""How much longer than the plain model does a real training step take, with gloo between processes?

A GPT of about 30 M parameters, forward and backward, wall time of the slowest rank; each rank is one process with one thread.
The plain model does the same work on each rank and exchanges nothing, so (time - plain time) is all that sharding costs. The
optimizer steps between the samples, unmeasured, so that every step gathers new values. Rank r trains on data of its own; the
losses of upstream and ours are compared, since a fast wrong step is worth nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import common
import models
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

VOCAB_SIZE, LENGTH, DIM, NUM_BLOCKS, NUM_HEADS = 8192, 64, 512, 7, 8
TARGET = common.Target(0.65, 0.45)


def stepper(model: torch.nn.Module, tokens: torch.Tensor, losses: list[float]) -> Callable[[], float]:
    """A function that trains one step and returns its wall time in ms; appends the mean loss over ranks to ``losses``.

    Collective: yes, over the world; all ranks start together.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def sample() -> float:
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        begin = time.perf_counter()
        loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        spent_ms = (time.perf_counter() - begin) * 1e3
        optimizer.step()
        both = torch.tensor([spent_ms, loss.item()], dtype=torch.float64)
        dist.all_reduce(slowest := both[:1].clone(), op=dist.ReduceOp.MAX)
        dist.all_reduce(total := both[1:].clone())
        losses.append(total.item() / dist.get_world_size())
        return slowest.item()

    return sample


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", options.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,))
    rounds = options.rounds or (7 if options.quick else 30)
    tokens = torch.randint(VOCAB_SIZE, (1, 33), generator=torch.Generator().manual_seed(rank))
    for mixed in (False, True):
        functions: dict[str, Callable[[], float]] = {}
        losses: dict[str, list[float]] = {}
        for name in options.implementations:
            torch.manual_seed(0)
            model = models.GPT(VOCAB_SIZE, LENGTH, DIM, NUM_BLOCKS, NUM_HEADS)
            num_parameters = models.numel_of(model)
            common.shard(model, model.blocks, name, mesh, mixed=mixed)
            losses[name] = []
            functions[name] = stepper(model, tokens, losses[name])
        samples = common.interleave(functions, rounds, warmup=2)
        if rank == 0:
            common.report(result_of(samples, losses, options.world, num_parameters, mixed), options.json)
        del functions, model
    dist.destroy_process_group()


def result_of(
    samples: common.Samples, losses: dict[str, list[float]], world_size: int, num_parameters: int, mixed: bool
) -> common.Result:
    details: dict[str, Any] = {
        "step_ms": {name: common.Spread.of(values).p50 for name, values in samples.items()},
        "last_loss": {name: values[-1] for name, values in losses.items()},
        "num_parameters": num_parameters,
    }
    if {common.OURS, common.UPSTREAM} <= losses.keys():
        pairs = zip(losses[common.OURS], losses[common.UPSTREAM], strict=True)
        details["largest_loss_difference"] = max(abs(ours - upstream) for ours, upstream in pairs)
    steps = "  ".join(f"{name} {value:.0f} ms" for name, value in details["step_ms"].items())
    print(f"    step: {steps}   largest loss difference: {details.get('largest_loss_difference', 'not compared')}")
    return common.Result.of(
        "gloo_step",
        f"gloo step over plain, {world_size} ranks",
        "bf16, fp32 reduce" if mixed else "fp32",
        "ms",
        common.over_plain(samples),
        TARGET if world_size == 2 else None,
        **details,
    )


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--world", type=int, default=2, help="number of processes; the target is for 2")
    arguments.add_argument("--rounds", type=int, help="samples of each implementation")
    options = arguments.parse_args()
    common.start(options, __doc__)
    common.on_ranks(run_rank, options)


if __name__ == "__main__":
    main()
