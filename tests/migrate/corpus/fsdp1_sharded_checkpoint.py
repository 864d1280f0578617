"""Sharded state dicts through torch.distributed.checkpoint, there and back."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    model = FSDP(net, device_id=torch.device("cpu"), use_orig_params=True)
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
with FSDP.state_dict_type(
    model,
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(offload_to_cpu=False),
    ShardedOptimStateDictConfig(offload_to_cpu=False),
):
    state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder[0])

again, optimizer2 = make()
with FSDP.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    again.load_state_dict(state["model"])
train(again, optimizer2, 2)
dist.barrier()
os._exit(0)
