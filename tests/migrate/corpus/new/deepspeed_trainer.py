"""DeepSpeed, ZeRO-1, with an optimizer and a schedule of one's own; the step is taken in another function."""
import os

import fsdp2
import torch
import torch.distributed as dist
from torch import nn


def train_step(engine, batch):
    loss = engine(batch).square().mean()
    (loss * 0.5).backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.lr_scheduler.step()
    return loss


def main():
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    # fsdp2: FusedAdam is torch's, whose foreach implementation handles all shards at once.
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    engine = fsdp2.parallelize(net, "zero1")
    engine.optimizer = optimizer
    engine.lr_scheduler = schedule
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = train_step(engine, torch.randn(4, 6))
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f} lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)
    dist.barrier()
    os._exit(0)


main()
