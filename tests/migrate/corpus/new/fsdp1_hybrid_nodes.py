"""HYBRID_SHARD and its ZeRO-2 kind without a mesh: FSDP1 takes the GPUs of a node, so this needs them before it is migrated."""
import os

import torch
import torch.distributed as dist
import fsdp2

# fsdp2: HYBRID_SHARD is "hsdp": a 2-D mesh of nodes and the LOCAL_WORLD_SIZE ranks of each;
#   shard_size= or a 2-D mesh= says otherwise.
# fsdp2: _HYBRID_SHARD_ZERO2 is "hsdp_zero2": a 2-D mesh of nodes and the LOCAL_WORLD_SIZE ranks of
#   each; shard_size= or a 2-D mesh= says otherwise.
STRATEGIES = {
    "node": "hsdp",
    "node2": "hsdp_zero2",
    "all": "zero3",
}


def shard(net, name):
    # fsdp2: sync_module_states=True dropped: parallelize broadcasts the first rank's values by default.
    return fsdp2.parallelize(net, wrap=None, strategy=STRATEGIES[name])


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
