"""Two ranks, of which the second does something wrong in its third step: ``python hanging_program.py FAULT STORE_FILE``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fsdp2
from fsdp2.clients import state

NUM_LAYERS = 4


def rank_main(rank: int, fault: str, file: str) -> None:
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=30))
    torch.manual_seed(0)
    wide = 16 if fault == "shape" and rank == 1 else 8
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(NUM_LAYERS)])
    if fault == "shape":
        model[1] = nn.Sequential(nn.Linear(8, wide), nn.Linear(wide, 8))
        state.require_same_as_neighbors = lambda units: None  # which would name the parameter instead
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp2.watchdog(timeout=3):
        for step in range(4):
            if rank == 1 and step == 2:
                go_wrong(fault, model)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # behind an evaluation no backward compares what ranks did
            model(torch.ones(2, 8))
        dist.barrier()


def go_wrong(fault: str, model: nn.Module) -> None:
    if fault == "sleeps":
        model[1].register_forward_pre_hook(lambda *_: threading.Event().wait(), prepend=True)
    elif fault == "skips":
        forward = model.forward
        model.forward = lambda x: forward(x) if torch.is_grad_enabled() else model[1](model[0](x))
    elif fault == "dies":
        os.kill(os.getpid(), signal.SIGSTOP)  # as a host does that is gone: its connections stay open


if __name__ == "__main__":
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    ranks = [context.Process(target=rank_main, args=(rank, sys.argv[1], sys.argv[2])) for rank in range(2)]
    for each in ranks:
        each.start()
    waited_for = ranks[:1] if sys.argv[1] == "dies" else ranks
    for each in waited_for:
        each.join()
    print("statuses", [each.exitcode for each in waited_for], flush=True)
    for each in ranks:
        each.kill()
