"""How long do a checkpoint's save and load take, against torch.distributed.checkpoint's?

A GPT of about 33 M parameters with AdamW (390 MB of fp32 together; --quick: 60 MB) sharded over two gloo ranks, each a process of its
own; time is to the slowest rank's end. Files are written to --folder (a temporary one), and read from the page cache.

    save, synchronous    ours ``Checkpointer.save`` with ``asynchronous=False``, upstream ``dcp.save`` of the same state
    load                 ours ``Checkpointer.load``, upstream ``dcp.load`` into the same state: the bytes alone, nothing set
    load and set         upstream with ``get_state_dict`` before and ``set_state_dict`` after, as a program has to call it
    save_safetensors     a model of 390 MB: ours with every rank writing, "upstream" with rank 0 alone writing (``num_writers=1``)

``--profile`` prints where rank 0 spends its time in each of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import json
import pstats
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.checkpoint import Checkpointer, save_safetensors

WORLD_SIZE = 2
QUICK, TRAINED, WHOLE = (256, 4), (512, 9), (1024, 7)  # dim, number of blocks: 21, 130 and 390 MB of fp32
TIMES = dict[str, dict[str, list[float]]]


@contextlib.contextmanager
def profiled(wanted: bool, what: str) -> Iterator[None]:
    if not wanted or dist.get_rank() != 0:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    print(f"--- {what}", flush=True)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(45)


def timed(function: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    function()
    spent = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def trained(size: tuple[int, int]) -> tuple[models.GPT, torch.optim.AdamW]:
    """Sharded, with moments."""
    torch.manual_seed(0)
    model = models.GPT(8192, 128, *size, 8)
    common.shard(model, model.blocks, common.OURS, init_device_mesh("cpu", (WORLD_SIZE,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def checkpointer_and_dcp(folder: Path, size: tuple[int, int], rounds: int, profile: bool) -> TIMES:
    model, optimizer = trained(size)
    checkpointer = Checkpointer(folder / "ours", model, optimizer, asynchronous=False, keep_last=None)
    upstream = folder / "upstream"

    def state() -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def upstream_save() -> None:
        dcp.save(state(), checkpoint_id=upstream)

    def upstream_load_and_set() -> None:
        found = state()
        dcp.load(found, checkpoint_id=upstream)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    times: TIMES = {"save, synchronous": {}, "load": {}, "load and set": {}}

    def add(figure: str, way: str, function: Callable[[], object]) -> None:
        times[figure].setdefault(way, []).append(timed(function))

    for index in range(rounds + 1):
        if index == 1:  # the first round warms up
            times = {figure: {} for figure in times}
        with profiled(profile and index == rounds, "save"):
            add("save, synchronous", common.OURS, lambda index=index: checkpointer.save(index))
        if dist.get_rank() == 0:
            shutil.rmtree(upstream, ignore_errors=True)
        add("save, synchronous", common.UPSTREAM, upstream_save)
        with profiled(profile and index == rounds, "load"):
            add("load", common.OURS, checkpointer.load)
        into = state()
        add("load", common.UPSTREAM, lambda into=into: dcp.load(into, checkpoint_id=upstream))
        del into
        add("load and set", common.OURS, checkpointer.load)
        add("load and set", common.UPSTREAM, upstream_load_and_set)
    checkpointer.close()
    return times


def safetensors(folder: Path, size: tuple[int, int], rounds: int, profile: bool) -> TIMES:
    torch.manual_seed(0)
    model = models.GPT(8192, 128, *size, 8)
    common.shard(model, model.blocks, common.OURS, init_device_mesh("cpu", (WORLD_SIZE,)))
    max_shard_size = 4 * models.numel_of(model) // (2 * WORLD_SIZE)
    times: dict[str, list[float]] = {common.OURS: [], common.UPSTREAM: []}
    for index in range(-1, rounds):
        for way, num_writers in ((common.OURS, None), (common.UPSTREAM, 1)):
            target = folder / way
            with profiled(profile and index == rounds - 1, f"save_safetensors, num_writers={num_writers}"):
                spent = timed(functools.partial(save_safetensors, model, target, max_shard_size, num_writers=num_writers))
            if index >= 0:
                times[way].append(spent)
            if dist.get_rank() == 0:
                shutil.rmtree(target)
    return {"save_safetensors, every rank over one writing": times}


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Collective: yes, over the world."""
    warnings.simplefilter("ignore")  # upstream's own
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    rounds = options.rounds or (3 if options.quick else 7)
    times = checkpointer_and_dcp(Path(folder), QUICK if options.quick else TRAINED, rounds, options.profile)
    times |= safetensors(Path(folder), QUICK if options.quick else WHOLE, rounds, options.profile)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--folder", type=Path, help="where to write, for instance on the disk that is meant")
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--profile", action="store_true")
    options = arguments.parse_args()
    common.start(options, __doc__)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        torch.multiprocessing.start_processes(run_rank, (options, folder), nprocs=WORLD_SIZE, start_method="fork")
        times: TIMES = json.loads((Path(folder) / "times.json").read_text())
    case = f"{'quick, ' if options.quick else ''}{WORLD_SIZE} ranks"
    for figure, samples in times.items():
        common.report(common.Result.of("checkpoints", figure, case, "s", samples, common.Target(1.0)), options.json)


if __name__ == "__main__":
    main()
