"""unshard(async_op=True) on one stream, waited for on another: the gathered buffer goes back to the first one, which does not wait."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp2.testing import pretend  # a simulated accelerator, whose streams take turns in the order of a seed

pretend.activate()
dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=4)


def output(seed: int | None) -> float:
    pretend.set_order(seed)  # None: everything runs as it is queued
    model = fully_shard(nn.Linear(8, 8, bias=False, device="pretend"), mesh=init_device_mesh("pretend", (4,)))
    nn.init.ones_(model.weight)
    x = torch.ones(1, 8, device="pretend")
    side = torch.Stream("pretend")
    side.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(side):
        model.unshard(async_op=True)
    found = model(x).sum()  # waits, as the documentation of unshard says
    with torch.pretend.stream(side):  # unrelated work
        torch.zeros(64, device="pretend")
    torch.pretend.synchronize()
    return found.item()


wrong = {seed: found for seed in range(20) if (found := output(seed)) != 64.0}
print(f"torch {torch.__version__}: expected 64.0, as in order ({output(None)}); got with other orders, by seed: {wrong}")
sys.exit(bool(wrong))
