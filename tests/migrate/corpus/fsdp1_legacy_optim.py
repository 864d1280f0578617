"""The optimizer state functions of early torch: gathered to rank 0, scattered from it."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def make():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), device_id=torch.device("cpu"))
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, optim


def train(model, optim, steps):
    for step in range(steps):
        loss = model(torch.full((2, 6), 0.1 * (step + 1 + dist.get_rank()))).sub(1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}", flush=True)


dist.init_process_group("gloo")
model, optim = make()
train(model, optim, 2)
weights = model.state_dict()
full_osd = FSDP.full_optim_state_dict(model, optim)  # rank 0 only

new_model, new_optim = make()
new_model.load_state_dict(weights)
sharded_osd = FSDP.scatter_full_optim_state_dict(full_osd if dist.get_rank() == 0 else None, new_model, optim=new_optim)
new_optim.load_state_dict(sharded_osd)
train(new_model, new_optim, 2)
dist.barrier()
os._exit(0)
