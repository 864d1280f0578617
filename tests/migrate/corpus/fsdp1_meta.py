"""A model that is built on the meta device."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Constant(nn.Linear):
    def reset_parameters(self):
        nn.init.constant_(self.weight, 0.25)
        nn.init.zeros_(self.bias)


def param_init_fn(module: nn.Module):
    """What FSDP calls for every module on the meta device."""
    module.to_empty(device=torch.device("cpu"), recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


dist.init_process_group("gloo")
with torch.device("meta"):
    model = nn.Sequential(Constant(4, 6), nn.ReLU(), Constant(6, 2))
policy = ModuleWrapPolicy([Constant])
model = FSDP(model, auto_wrap_policy=policy, param_init_fn=param_init_fn, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.rand(4, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
