"""torch's FSDP2 through its module, on a 2-D mesh, with something private."""
import os

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
print("modules", len(_get_managed_modules((model,)))) if dist.get_rank() == 0 else None
fsdp.fully_shard(model[0], mesh=mesh)
torch.distributed.fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
