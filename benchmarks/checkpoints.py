"""How long do a checkpoint's save and load take, against torch.distributed.checkpoint's?

A GPT of about 33 M parameters with AdamW (390 MB of fp32 together; --quick: 60 MB) sharded over two gloo ranks, each a process of its
own; time is to the slowest rank's end, processor time is that of all threads of both ranks. Files are written to --folder (a temporary
one), and read from the page cache; what a round has written is removed before the next, outside of the clock, of ours as of upstream's:
memory that was never touched costs a virtual machine more than memory that somebody has freed.

    save, synchronous    ours ``Checkpointer.save`` with ``asynchronous=False``, upstream ``dcp.save`` of the same state
    load                 ours ``Checkpointer.load``, upstream ``dcp.load`` into the same state: the bytes alone, nothing set
    load and set         upstream with ``get_state_dict`` before and ``set_state_dict`` after, as a program has to call it
    stall                how long training waits in an asynchronous save: ours ``Checkpointer.save``, upstream ``dcp.async_save``
    step during a save   training steps until that is written, over the median step without one; with --world 1 on two cores, the
                         writer has one of its own
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
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.checkpoint import Checkpointer, save_safetensors

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


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds to the slowest rank's end, and processor seconds of all ranks."""
    dist.barrier()
    begin, processor = time.perf_counter(), time.process_time()
    function()
    spent = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    worked = torch.tensor(time.process_time() - processor, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    dist.all_reduce(worked)
    return spent.item(), worked.item()


def trained(size: tuple[int, int]) -> tuple[models.GPT, torch.optim.AdamW]:
    """Sharded, with moments."""
    torch.manual_seed(0)
    model = models.GPT(8192, 128, *size, 8)
    common.shard(model, model.blocks, common.OURS, init_device_mesh("cpu", (dist.get_world_size(),)))
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

    into = state()
    saves = {common.OURS: lambda: checkpointer.save(1), common.UPSTREAM: upstream_save}
    written = {common.OURS: folder / "ours/step_000001", common.UPSTREAM: upstream}
    loads = {common.OURS: checkpointer.load, common.UPSTREAM: lambda: dcp.load(into, checkpoint_id=upstream)}
    loads_and_sets = {common.OURS: checkpointer.load, common.UPSTREAM: upstream_load_and_set}
    times: TIMES = {}
    for index in range(-1, rounds):
        ways = [common.OURS, common.UPSTREAM] if index % 2 else [common.UPSTREAM, common.OURS]
        for figure, functions in (("save, synchronous", saves), ("load", loads), ("load and set", loads_and_sets)):
            for way in ways:
                if functions is saves and dist.get_rank() == 0:
                    shutil.rmtree(written[way], ignore_errors=True)
                with profiled(profile and index == rounds - 1 and way == common.OURS, figure):
                    spent, worked = timed(functions[way])
                for name, value in ((figure, spent), (f"{figure}, processor", worked)) if index >= 0 else ():  # the first warms up
                    times.setdefault(name, {}).setdefault(way, []).append(value)
    checkpointer.close()
    return times


def asynchronous(folder: Path, size: tuple[int, int], rounds: int) -> TIMES:
    model, optimizer = trained(size)
    tokens = torch.randint(8192, (2, 128))
    others = dist.new_group(backend="gloo")  # upstream's thread communicates while training does
    checkpointer = Checkpointer(folder / "ours_asynchronous", model, optimizer, keep_last=1)

    def ours(index: int, saving: list[Callable[[], bool]]) -> None:
        checkpointer.save(index)
        pending = checkpointer._pending
        assert pending is not None
        saving.append(pending.done)

    def upstream(index: int, saving: list[Callable[[], bool]]) -> None:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        future: Any = dcp.async_save(
            {"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / f"async_{index}", process_group=others
        )
        saving.append(future.done)

    def step() -> None:
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def all_done(done: Callable[[], bool]) -> bool:
        left = torch.tensor(float(not done()))
        dist.all_reduce(left)
        return left.item() == 0

    times: TIMES = {"stall of an asynchronous save": {}, "step during a save, over one without": {}}
    for index in range(-2, rounds):
        quiet = statistics.median(timed(step)[0] for _ in range(4))
        for way, start in ((common.OURS, ours), (common.UPSTREAM, upstream)):
            saving: list[Callable[[], bool]] = []
            stall, _ = timed(functools.partial(start, index + 2, saving))
            during = [timed(step)[0]]
            while not all_done(saving[0]):
                during.append(timed(step)[0])
            if index >= 0:
                for figure, value in zip(times, (stall, statistics.mean(during) / quiet), strict=True):
                    times[figure].setdefault(way, []).append(value)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f"async_{index + 2}")
    checkpointer.close()
    return times


def safetensors(folder: Path, size: tuple[int, int], rounds: int, profile: bool) -> TIMES:
    torch.manual_seed(0)
    model = models.GPT(8192, 128, *size, 8)
    common.shard(model, model.blocks, common.OURS, init_device_mesh("cpu", (dist.get_world_size(),)))
    max_shard_size = 4 * models.numel_of(model) // (2 * dist.get_world_size())
    times: dict[str, list[float]] = {common.OURS: [], common.UPSTREAM: []}
    for index in range(-1, rounds):
        for way, num_writers in ((common.OURS, None), (common.UPSTREAM, 1)):
            target = folder / way
            with profiled(profile and index == rounds - 1, f"save_safetensors, num_writers={num_writers}"):
                spent, _ = timed(functools.partial(save_safetensors, model, target, max_shard_size, num_writers=num_writers))
            if index >= 0:
                times[way].append(spent)
            if dist.get_rank() == 0:
                shutil.rmtree(target)
    return {"save_safetensors, every rank over one writing": times}


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Collective: yes, over the world."""
    warnings.simplefilter("ignore")  # upstream's own
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", options.world), rank=rank, world_size=options.world)
    rounds = options.rounds or (3 if options.quick else 7)
    times = checkpointer_and_dcp(Path(folder), QUICK if options.quick else TRAINED, rounds, options.profile)
    times |= asynchronous(Path(folder), QUICK if options.quick else TRAINED, rounds)
    times |= safetensors(Path(folder), QUICK if options.quick else WHOLE, rounds, options.profile)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--folder", type=Path, help="where to write, for instance on the disk that is meant")
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--world", type=int, default=2)
    arguments.add_argument("--profile", action="store_true")
    options = arguments.parse_args()
    common.start(options, __doc__)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        torch.multiprocessing.start_processes(run_rank, (options, folder), nprocs=options.world, start_method="fork")
        times: TIMES = json.loads((Path(folder) / "times.json").read_text())
    case = f"{'quick, ' if options.quick else ''}{options.world} ranks"
    for figure, samples in times.items():
        unit = "x" if "over one without" in figure else "s"
        common.report(common.Result.of("checkpoints", figure, case, unit, samples, common.Target(1.0)), options.json)


if __name__ == "__main__":
    main()
