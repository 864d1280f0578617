"""Offloading by a flag, and a process group that is passed on."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import always_wrap_policy

OFFLOAD = bool(int(os.environ.get("OFFLOAD", "0")))


def build(group):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    return FSDP(
        model,
        process_group=group,
        cpu_offload=CPUOffload(offload_params=OFFLOAD),
        auto_wrap_policy=always_wrap_policy,
        device_id=torch.device("cpu"),
    )


dist.init_process_group("gloo")
model = build(dist.group.WORLD)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(5, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
