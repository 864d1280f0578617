"""HYBRID_SHARD and its ZeRO-2 kind without a mesh: FSDP1 takes the GPUs of a node, so this needs them before it is migrated."""
import os

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import ShardingStrategy

STRATEGIES = {
    "node": ShardingStrategy.HYBRID_SHARD,
    "node2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "all": ShardingStrategy.FULL_SHARD,
}


def shard(net, name):
    return fsdp.FullyShardedDataParallel(net, sharding_strategy=STRATEGIES[name], sync_module_states=True)


dist.init_process_group("gloo")
for name in STRATEGIES:
    torch.manual_seed(0)
    model = shard(torch.nn.Linear(6, 6), name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        loss = model(torch.full((2, 6), 1.0 + dist.get_rank() + step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{name} loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
