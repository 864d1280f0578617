"""Arguments gathered step by step in a dict; a policy by lambda."""
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

REPLICATE = False

fsdp_kwargs = {
    "auto_wrap_policy": partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
    "limit_all_gathers": True,
    "device_id": torch.device("cpu"),  # no accelerator here
}
if REPLICATE:
    fsdp_kwargs["sharding_strategy"] = ShardingStrategy.NO_SHARD
fsdp_kwargs["use_orig_params"] = True
fsdp_kwargs.update(mixed_precision=MixedPrecision(reduce_dtype=torch.float32), forward_prefetch=True)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)), **fsdp_kwargs)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(7 + dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 5)).square().mean()
    loss.backward()
    model.clip_grad_norm_(max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
