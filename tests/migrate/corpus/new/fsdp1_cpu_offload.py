"""Offloading by a flag, and a process group that is passed on."""
import os

import torch
import torch.distributed as dist
from torch import nn
import fsdp2
from torch.distributed.device_mesh import DeviceMesh

OFFLOAD = bool(int(os.environ.get("OFFLOAD", "0")))


def build(group):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    # fsdp2: process_group is a mesh over the ranks of that group.
    # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
    #   mesh.
    return fsdp2.parallelize(
        model,
        mesh=DeviceMesh.from_group(group, "cpu"),
        offload_policy=fsdp2.CPUOffloadPolicy() if OFFLOAD else fsdp2.OffloadPolicy(),
        wrap=fsdp2.wrap.by_predicate(lambda module: True),
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
