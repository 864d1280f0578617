"""Which algorithm of each collective is the fastest on gloo, by size, dtype and number of ranks?

Wall time from issue to finished result of the slowest rank, each rank one process with one thread on this host. Buffers are
allocated once, the algorithms' own scratch inside the measured time. Reductions divide by the number of ranks. The answer is
what ``choose_all_gather`` and its siblings in ``fsdp2/core/comm/collectives.py`` are made from.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import common
import torch
import torch.distributed as dist
import torch.multiprocessing

from fsdp2.core.comm import collectives as ours

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_gather": get_args(ours.AllGatherAlgorithm),
    "reduce_scatter": get_args(ours.ReduceScatterAlgorithm),
    "all_reduce": get_args(ours.AllReduceAlgorithm),
}


def issuers(collective: str, full: torch.Tensor, row: torch.Tensor) -> Iterator[tuple[str, Callable[[], ours.Pending]]]:
    """Each algorithm's name, and a function that issues it: ``full`` is (W * P,), ``row`` is (P,)."""
    world: Any = dist.group.WORLD
    reduction = ours.divisions_for(dist.get_world_size(), 1, full.dtype, "gloo").reduce_scatter
    for name in ALGORITHMS[collective]:
        algorithm: Any = name
        if collective == "all_gather":
            yield name, lambda algorithm=algorithm: ours.all_gather([full], [row], world, algorithm, True)
        elif collective == "reduce_scatter":
            yield name, lambda algorithm=algorithm: ours.reduce_scatter(row, full, world, reduction, algorithm, True)
        else:
            yield name, lambda algorithm=algorithm: ours.all_reduce(full, world, reduction, algorithm, True)


def sampler(issue: Callable[[], ours.Pending], repeats: int) -> Callable[[], float]:
    """A function that runs the collective ``repeats`` times and returns the slowest rank's ms for one. Collective: yes."""

    def sample() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            issue().finish()
        spent_ms = torch.tensor((time.perf_counter() - begin) * 1e3 / repeats)
        dist.all_reduce(spent_ms, op=dist.ReduceOp.MAX)
        return spent_ms.item()

    return sample


def run_rank(rank: int, options: argparse.Namespace, world_size: int, directory: str) -> None:
    """One rank; rank 0 reports. Collective: yes, over the world."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for dtype_name, collective in ((dtype, name) for dtype in options.dtypes for name in options.collectives):
        for kib in options.kib:
            numel = (kib << 10) // DTYPES[dtype_name].itemsize // world_size
            full, row = torch.ones(world_size * numel, dtype=DTYPES[dtype_name]), torch.ones(numel, dtype=DTYPES[dtype_name])
            repeats = 10 if kib <= 256 else 1
            functions = {name: sampler(issue, repeats) for name, issue in issuers(collective, full, row)}
            samples = common.interleave(functions, 5 if options.quick else 15 if kib <= 8192 else 7, warmup=2)
            if rank == 0:
                case = f"{world_size} ranks, {dtype_name}, {kib} KiB"
                common.report(common.Result.of("collectives", f"gloo {collective}", case, "ms", samples), options.json)
    dist.destroy_process_group()


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4], help="numbers of processes")
    arguments.add_argument("--kib", type=int, nargs="+", default=[4, 64, 256, 1024, 8192, 51200], help="W * P elements")
    arguments.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    arguments.add_argument("--collectives", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    options = arguments.parse_args()
    common.start(argparse.Namespace(**vars(options) | {"implementations": []}), __doc__)
    with tempfile.TemporaryDirectory() as directory:
        for world_size in options.worlds:
            torch.multiprocessing.spawn(run_rank, (options, world_size, directory), nprocs=world_size)


if __name__ == "__main__":
    main()
