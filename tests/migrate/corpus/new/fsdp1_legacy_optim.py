"""The optimizer state functions of early torch: gathered to rank 0, scattered from it."""
import os

import torch
import torch.distributed as dist
from torch import nn
import fsdp2.checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def make():
    torch.manual_seed(0)
    # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
    #   mesh.
    model = fsdp2.parallelize(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), wrap=None)
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
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
full_osd = fsdp2.checkpoint.full_optimizer_state_dict(model, optim, by_name=True)  # rank 0 only

new_model, new_optim = make()
set_model_state_dict(new_model, weights, options=StateDictOptions(full_state_dict=True))
# fsdp2: other ranks pass an empty dict: what they lack is broadcast from rank 0.
sharded_osd = (full_osd if dist.get_rank() == 0 else None) or {}
set_optimizer_state_dict(new_model, new_optim, sharded_osd, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
train(new_model, new_optim, 2)
dist.barrier()
os._exit(0)
