"""Star imports, modules under other names, and an optimizer made by a helper."""
import os
import torch
import torch.distributed as dist
import torch.distributed.fsdp.wrap as policies
from torch import nn
from torch.distributed.fsdp import *
import torch.distributed.fsdp.sharded_grad_scaler


def policy():
    return policies.ModuleWrapPolicy((nn.Linear,))


def optimizer_for(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


dist.init_process_group("gloo"); torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
model = FullyShardedDataParallel(model, auto_wrap_policy=policy(), device_id=torch.device("cpu"))
optimizer = optimizer_for(model)
scaler = torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler("cpu", enabled=False)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    loss = model(torch.randn(4, 5)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if dist.get_rank() == 0: print(f"loss {loss.item():.6f}", flush=True)
units = FullyShardedDataParallel.fsdp_modules(model)
if dist.get_rank() == 0: print("units", len(units), flush=True)
dist.barrier()
os._exit(0)
