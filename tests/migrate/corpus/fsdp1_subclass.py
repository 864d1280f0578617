"""A wrapper class derived from FSDP, handed on as a value, under an alias of the module."""
import os

import torch
import torch.distributed as dist
import torch.distributed.fsdp as shard
from torch import nn


class Logged(shard.FullyShardedDataParallel):
    calls = 0

    def forward(self, *args, **kwargs):
        Logged.calls += 1
        return super().forward(*args, **kwargs)


def build(wrapper, **kwargs):
    torch.manual_seed(0)
    return wrapper(nn.Linear(4, 4), **kwargs)


dist.init_process_group("gloo")
model = build(Logged, device_id=torch.device("cpu"), sharding_strategy=shard.ShardingStrategy.SHARD_GRAD_OP)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    loss = model(torch.randn(4, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} calls {Logged.calls}", flush=True)
dist.barrier()
os._exit(0)
