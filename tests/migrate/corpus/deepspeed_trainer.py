"""DeepSpeed, ZeRO-1, with an optimizer and a schedule of one's own; the step is taken in another function."""
import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import FusedAdam
from torch import nn


def train_step(engine, batch):
    loss = engine(batch).square().mean()
    engine.backward(loss * 0.5)
    engine.step()
    return loss


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = FusedAdam(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = train_step(engine, torch.randn(4, 6))
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f} lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)
    dist.barrier()
    os._exit(0)


main()
