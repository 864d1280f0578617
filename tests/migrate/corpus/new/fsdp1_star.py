"""Star imports, modules under other names, and an optimizer made by a helper."""
import os
import torch
import torch.distributed as dist
import fsdp2
from torch import nn


def policy():
    return fsdp2.wrap.by_class(nn.Linear)


def optimizer_for(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


dist.init_process_group("gloo"); torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
# fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
#   mesh.
model = fsdp2.parallelize(model, wrap=policy())
optimizer = optimizer_for(model)
scaler = torch.amp.GradScaler("cpu", enabled=False)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    loss = model(torch.randn(4, 5)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if dist.get_rank() == 0: print(f"loss {loss.item():.6f}", flush=True)
units = [module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]
if dist.get_rank() == 0: print("units", len(units), flush=True)
dist.barrier()
os._exit(0)
