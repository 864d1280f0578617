"""Gradient accumulation, with the context chosen by an expression."""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, BackwardPrefetch

MICRO_BATCHES = 3


def accumulate(model, batches):
    total = 0.0
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        context = nullcontext() if last else model.no_sync()
        with context:
            loss = model(batch).pow(2).mean() / len(batches)
            loss.backward()
        total += loss.item()
    return total


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    model = FullyShardedDataParallel(
        net, None, ShardingStrategy.SHARD_GRAD_OP, backward_prefetch=None,  # no prefetch
        device_id=torch.device("cpu"), use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = accumulate(model, [torch.randn(2, 6) for _ in range(MICRO_BATCHES)])
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss:.6f}", flush=True)
    dist.barrier()
    os._exit(0)


main()
