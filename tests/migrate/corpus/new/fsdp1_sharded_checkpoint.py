"""Sharded state dicts through torch.distributed.checkpoint, there and back."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
import fsdp2
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
    #   mesh.
    # fsdp2: use_orig_params=True dropped: parameters always are the original ones, sharded.
    model = fsdp2.parallelize(net, wrap=None)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps):
    for step in range(steps):
        loss = model(torch.full((2, 6), 0.1 * (step + 1 + dist.get_rank()))).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}", flush=True)


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
model, optimizer = make()
train(model, optimizer, 2)
state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
dcp.save(state, checkpoint_id=folder[0])

again, optimizer2 = make()
state = {"model": again.state_dict()}
dcp.load(state, checkpoint_id=folder[0])
# fsdp2: a DCP folder of the old script loads as it is; files that each rank saved: `fsdp2 convert
#   OLD NEW --to dcp`.
again.load_state_dict(state["model"])
train(again, optimizer2, 2)
dist.barrier()
os._exit(0)
