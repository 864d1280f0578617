"""What does each strategy keep on a rank, and how long is its step compared with torch's nearest counterpart?

First bytes: every strategy with bf16 compute and fp32 or bf16 reduction, AdamW, measured in storages between two micro-batches that
accumulate, per parameter and category, next to the formula and the ZeRO paper's 2 + 2 + 12. Then time: a whole training step in fp32
(forward, backward, AdamW), wall time of the slowest rank, on gloo; all strategies and DDP, DDP with ZeroRedundancyOptimizer, and
FSDP2 in its forms, in turns in one process a rank. Rank r trains on data of its own; losses are compared at the end.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import common
import models
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

VOCAB_SIZE, LENGTH, DIM, NUM_BLOCKS, NUM_HEADS = 2048, 32, 256, 4, 8
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2", "hsdp_global")
COUNTERPARTS = {
    "ddp": "DDP",
    "zero1": "DDP, ZeroRedundancyOptimizer",
    "zero2": "FSDP2, reshard_after_forward=False",
    "zero3": "FSDP2",
    "hsdp": "FSDP2, 2-D mesh",
    "hsdp_zero2": "FSDP2, 2-D mesh, False",
    "hsdp_global": "FSDP2, reshard_after_forward=int",
}


def new_model() -> models.GPT:
    torch.manual_seed(0)
    return models.GPT(VOCAB_SIZE, LENGTH, DIM, NUM_BLOCKS, NUM_HEADS)


def ours(strategy: str, shard_size: int, **options: Any) -> nn.Module:
    import fsdp2

    size = shard_size if strategy.startswith("hsdp") else None
    return fsdp2.parallelize(new_model(), strategy, wrap={models.TransformerBlock}, shard_size=size, **options)


def counterpart(strategy: str, shard_size: int, flat: DeviceMesh, hybrid: DeviceMesh) -> nn.Module:
    """torch's counterpart that is nearest to ``strategy``."""
    from torch.distributed.fsdp import fully_shard

    model = new_model()
    if strategy in ("ddp", "zero1"):
        return DistributedDataParallel(model)
    options: dict[str, Any] = {"mesh": hybrid if strategy in ("hsdp", "hsdp_zero2") else flat}
    if strategy in ("zero2", "hsdp_zero2"):
        options["reshard_after_forward"] = False
    elif strategy == "hsdp_global" and 1 < shard_size < flat.size():
        options["reshard_after_forward"] = shard_size
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def stepper(model: nn.Module, tokens: torch.Tensor, losses: list[float], redundancy: bool = False) -> Callable[[], float]:
    """A function that trains one step and returns its wall time in ms on the slowest rank. Collective: yes."""
    if redundancy:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def sample() -> float:
        dist.barrier()
        begin = time.perf_counter()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        both = torch.tensor([(time.perf_counter() - begin) * 1e3, loss.item()], dtype=torch.float64)
        dist.all_reduce(slowest := both[:1].clone(), op=dist.ReduceOp.MAX)
        dist.all_reduce(total := both[1:].clone())
        losses.append(total.item() / dist.get_world_size())
        return slowest.item()

    return sample


def report_bytes(options: argparse.Namespace, rank: int, tokens: torch.Tensor) -> None:
    """One line a strategy and reduce dtype. Collective: yes."""
    import fsdp2
    from fsdp2.state_bytes import expected_state_bytes, measured_state_bytes

    numel = models.numel_of(new_model())
    names = ("compute", "gradients", "master", "Adam", "sum")
    if rank == 0:
        print(f"  bytes a parameter: measured (formula); {numel:,} parameters, {options.world} ranks, nodes of {options.node}")
        print("    " + f"{'strategy':<12} {'reduce':<6}" + "".join(f"{name:>18}" for name in names))
    for reduce_dtype in (torch.float32, torch.bfloat16):
        policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for strategy in STRATEGIES:
            model = ours(strategy, options.node, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for last in (True, False):
                with fsdp2.accumulate(model, last=last):
                    model(tokens).float().square().mean().backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
            measured = astuple(measured_state_bytes(model, optimizer))
            size = options.node if strategy.startswith("hsdp") else None
            expected = astuple(
                expected_state_bytes(
                    strategy,
                    numel,
                    world_size=options.world,
                    shard_size=size,
                    param_dtype=torch.bfloat16,
                    reduce_dtype=reduce_dtype,
                )
            )
            if rank == 0:
                pairs = zip((*measured, sum(measured)), (*expected, sum(expected)), strict=True)
                cells = "".join(f"{f'{one / numel:.3f} ({other / numel:g})':>18}" for one, other in pairs)
                print(f"    {strategy:<12} {'fp32' if reduce_dtype is torch.float32 else 'bf16':<6}{cells}", flush=True)
                result = common.Result.of(
                    "strategies",
                    f"bytes a parameter, {options.world} ranks",
                    f"{strategy}, {'fp32' if reduce_dtype is torch.float32 else 'bf16'} reduce",
                    "B",
                    {common.OURS: [sum(measured) / numel]},
                    common.Target(bound=sum(expected) / numel * 1.02, of="value"),
                    measured=dict(zip(names, measured, strict=False)),
                    expected=dict(zip(names, expected, strict=False)),
                )
                common.report(result, options.json)


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", options.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world)
    flat = init_device_mesh("cpu", (options.world,))
    hybrid = init_device_mesh("cpu", (options.world // options.node, options.node), mesh_dim_names=("replicate", "shard"))
    tokens = torch.randint(VOCAB_SIZE, (1, LENGTH), generator=torch.Generator().manual_seed(rank))
    if common.OURS in options.implementations:
        report_bytes(options, rank, tokens)
    functions: dict[str, Callable[[], float]] = {}
    losses: dict[str, list[float]] = {}
    for strategy in STRATEGIES:
        if common.OURS in options.implementations:
            losses[strategy] = []
            functions[strategy] = stepper(ours(strategy, options.node), tokens, losses[strategy])
        if common.UPSTREAM in options.implementations:
            name = COUNTERPARTS[strategy]
            losses[name] = []
            model = counterpart(strategy, options.node, flat, hybrid)
            functions[name] = stepper(model, tokens, losses[name], redundancy=strategy == "zero1")
    if not functions:
        dist.destroy_process_group()
        return
    samples = common.interleave(functions, options.rounds or (5 if options.quick else 20), warmup=2)
    if rank == 0:
        for strategy in STRATEGIES:
            pair = {common.OURS: strategy, common.UPSTREAM: COUNTERPARTS[strategy]}
            result = common.Result.of(
                "strategies",
                f"training step, {options.world} ranks, fp32",
                f"{strategy} / {COUNTERPARTS[strategy]}",
                "ms",
                {implementation: samples[name] for implementation, name in pair.items() if name in samples},
                largest_loss_difference=largest_difference([losses[name] for name in pair.values() if name in losses]),
            )
            common.report(result, options.json)
        print(f"  largest difference of a loss from the first one's: {largest_difference(list(losses.values())):.3g}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def largest_difference(losses: list[list[float]]) -> float:
    """The largest difference of any losses from those of the first training, step by step."""
    return max((abs(one - first) for each in losses[1:] for one, first in zip(each, losses[0], strict=True)), default=0.0)


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--world", type=int, default=4, help="number of processes")
    arguments.add_argument("--node", type=int, default=2, help="of which so many are a node, for hybrid strategies")
    arguments.add_argument("--rounds", type=int, help="samples of each")
    options = arguments.parse_args()
    common.start(options, __doc__)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run_rank, (options, directory), nprocs=options.world)


if __name__ == "__main__":
    main()
