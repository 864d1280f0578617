"""A wrapper made with partial, isinstance checks, and a policy for several classes."""
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

wrapper = functools.partial(
    FSDP,
    sharding_strategy=getattr(ShardingStrategy, os.environ.get("STRATEGY", "FULL_SHARD")),
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, (nn.Linear, nn.Conv1d))),
    device_id=torch.device("cpu"),
    use_orig_params=True,
)


def describe(module):
    return [name for name, child in module.named_modules() if isinstance(child, FSDP)]


dist.init_process_group("gloo")
torch.manual_seed(0)
model = wrapper(nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 2)))
if not isinstance(model, (FSDP, nn.DataParallel)):
    raise SystemExit("not wrapped")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    loss = model(torch.randn(4, 1, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} units {len(describe(model))}", flush=True)
dist.barrier()
os._exit(0)
