"""Step 1: one model on two processes.

torchrun --nproc-per-node 2 examples/tutorial/step1_two_processes.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from model import ByteModel, Text, next_byte_loss

import fsdp2


def main(steps: int = 30) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same values on every rank
    model = ByteModel()
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = Text()
    for step in range(steps):
        batch = text.batch(step, 16, rank, world_size)
        loss = next_byte_loss(model(batch[:, :-1]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step:2d}  loss {loss.item() / world_size:.4f}")
    if rank == 0:
        print(fsdp2.summary(model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
