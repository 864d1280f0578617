"""Step 4: GPUs and several hosts: the same program, with a mesh, a compiler, and a profile.

torchrun --nproc-per-node 2 examples/tutorial/step4_many_hosts.py
torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29500 examples/tutorial/step4_many_hosts.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from model import ByteModel, Text, next_byte_loss
from torch.distributed.device_mesh import init_device_mesh

import fsdp2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler on CPUs")
    parser.add_argument("--profile", metavar="FILE", help="write a Chrome trace of one step of rank 0")
    options = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    shape = (world_size // ranks_per_host, ranks_per_host)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))  # gathers stay inside of a host

    torch.manual_seed(0)
    model = ByteModel()
    for block in model.blocks:
        if options.compile:
            block.compile()  # first compile the block, then shard it
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = Text()

    def train(step: int) -> torch.Tensor:
        batch = text.batch(step, 16, rank, world_size).to(device_type)
        loss = next_byte_loss(model(batch[:, :-1]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step in range(options.steps):
        loss = train(step)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step:2d}  loss {loss.item() / world_size:.4f}")
    if options.profile:
        with torch.profiler.profile() as profile:  # all ranks run the step; rank 0 writes
            train(options.steps)
        if rank == 0:
            profile.export_chrome_trace(options.profile)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
