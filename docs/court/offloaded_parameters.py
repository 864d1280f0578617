"""CPU offload: after a forward that no backward follows, a write on the host changes what the device still copies."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fsdp2.testing import pretend  # a simulated accelerator, whose streams take turns in the order of a seed

pretend.activate()
dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=4)


def evaluated(seed: int | None) -> float:
    pretend.set_order(seed)  # None: everything runs as it is queued
    model = nn.Linear(8, 8, bias=False, device="pretend")
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("pretend", (4,)), offload_policy=CPUOffloadPolicy())
    x = torch.ones(1, 8, device="pretend")
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        loss = model(x).sum()  # an evaluation between backward and the step, read later
    optimizer.step()  # on the host, which has not waited for the evaluation
    return loss.item()


wrong = {seed: found for seed in range(10) if (found := evaluated(seed)) != 64.0}
print(f"torch {torch.__version__}: expected 64.0, as in order ({evaluated(None)}); got with other orders, by seed: {wrong}")
sys.exit(bool(wrong))
