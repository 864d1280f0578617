"""A second forward on another stream does not wait for the parameters that the first one unsharded."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp2.testing import pretend  # a simulated accelerator, whose streams take turns in the order of a seed

pretend.activate()
dist.init_process_group(pretend.MODEL, store=dist.HashStore(), rank=0, world_size=4)


def outputs(seed: int | None) -> list[float]:
    pretend.set_order(seed)  # None: everything runs as it is queued
    model = fully_shard(nn.Linear(8, 8, bias=False, device="pretend"), mesh=init_device_mesh("pretend", (4,)))
    nn.init.ones_(model.weight)
    x = torch.ones(1, 8, device="pretend")
    ready, found = torch.pretend.current_stream().record_event(), []
    for side in (torch.Stream("pretend"), torch.Stream("pretend")):  # one for each micro-batch, to overlap them
        side.wait_event(ready)
        with torch.pretend.stream(side), torch.no_grad():
            found.append(model(x).sum())
    torch.pretend.synchronize()
    return [each.item() for each in found]


wrong = {seed: found for seed in range(20) if (found := outputs(seed)) != [64.0, 64.0]}
print(f"torch {torch.__version__}: expected [64.0, 64.0], as in order ({outputs(None)}); got with other orders, by seed: {wrong}")
sys.exit(bool(wrong))
