"""Arguments gathered step by step in a dict; a policy by lambda."""
import os

import torch
import torch.distributed as dist
from torch import nn
import fsdp2

REPLICATE = False

# no accelerator here
# fsdp2: limit_all_gathers=True dropped: prefetch is bounded to the next group, without stopping the
#   CPU.
# fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
#   mesh.
fsdp_kwargs = {
    "wrap": fsdp2.wrap.by_predicate(lambda module: isinstance(module, nn.Linear)),
}
if REPLICATE:
    # fsdp2: NO_SHARD is the ddp strategy: nothing is sharded.
    fsdp_kwargs["strategy"] = "ddp"
# fsdp2: use_orig_params=True dropped: parameters always are the original ones, sharded.
# fsdp2: forward_prefetch=True dropped: the next group is always prefetched, in the order of the
#   first iteration.
fsdp_kwargs.update(mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fsdp2.parallelize(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)), **fsdp_kwargs)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(7 + dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 5)).square().mean()
    loss.backward()
    fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
