"""share_comm_ctx: the end of one model's backward empties the list from which the backward of another one prefetches."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, share_comm_ctx

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def trained(share: bool) -> str:
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    for stage in stages:
        for module in [*stage, stage]:
            fully_shard(module, mesh=mesh)
    if share:
        share_comm_ctx(stages)
    losses = [stage(torch.ones(1, 4)).sum() for stage in stages]
    try:
        for loss in reversed(losses):
            loss.backward()
    except IndexError as error:
        return f"IndexError: {error}"
    return "trains"


found = {share: trained(share) for share in (False, True)}
print(f"torch {torch.__version__}: expected both to train; without and with a shared context: {found}")
sys.exit(found != {False: "trains", True: "trains"})
