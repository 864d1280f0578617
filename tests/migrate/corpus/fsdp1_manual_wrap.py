"""Manual wrap inside of the constructor, with a dict of arguments."""
import os
from typing import Dict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = wrap(nn.Linear(8, 4))
        self.layer2 = nn.Linear(4, 16)
        self.layer3 = wrap(nn.Linear(16, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(self.layer1(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)
wrapper_kwargs = dict(
    cpu_offload=CPUOffload(offload_params=False),
    backward_prefetch=BackwardPrefetch.BACKWARD_POST,  # less memory
    device_id=torch.device("cpu"),
)
with enable_wrap(wrapper_cls=FullyShardedDataParallel, **wrapper_kwargs):
    fsdp_model = wrap(Model())

optim = torch.optim.Adam(fsdp_model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    out = fsdp_model(torch.randn(6, 8))
    loss = out.pow(2).mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    if dist.get_rank() == 0:
        print("loss %.6f" % loss.item(), flush=True)
dist.barrier()
os._exit(0)
