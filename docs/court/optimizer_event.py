"""Unsharding over one rank does not wait for set_post_optim_event's event: forward reads parameters that are not written yet."""

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
    mesh = init_device_mesh("pretend", (4, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8, bias=False, device="pretend"), mesh=mesh)
    nn.init.ones_(model.weight)
    x = torch.ones(1, 8, device="pretend")
    model(x)
    model.reshard()
    side = torch.Stream("pretend")
    side.wait_stream(torch.pretend.current_stream())
    with torch.no_grad(), torch.pretend.stream(side):  # an optimizer on a stream of its own
        model.weight.to_local().mul_(2)
    model.set_post_optim_event(side.record_event())
    return model(x).sum().item()


wrong = {seed: found for seed in range(10) if (found := output(seed)) != 128.0}
print(f"torch {torch.__version__}: expected 128.0, as in order ({output(None)}); got with other orders, by seed: {wrong}")
sys.exit(bool(wrong))
