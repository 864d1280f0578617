"""A wrapper made with partial, isinstance checks, and a policy for several classes."""
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
import fsdp2

# fsdp2: backward_prefetch=BackwardPrefetch.BACKWARD_PRE dropped: the next group is always
#   prefetched in backward, as by BACKWARD_PRE.
# fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
#   mesh.
# fsdp2: use_orig_params=True dropped: parameters always are the original ones, sharded.
wrapper = functools.partial(
    fsdp2.parallelize,
    strategy={"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp", "_HYBRID_SHARD_ZERO2": "hsdp_zero2"}[os.environ.get("STRATEGY", "FULL_SHARD")],
    wrap=fsdp2.wrap.by_predicate(lambda module: isinstance(module, (nn.Linear, nn.Conv1d))),
)


def describe(module):
    return [name for name, child in module.named_modules() if isinstance(child, fsdp2.FSDPModule)]


dist.init_process_group("gloo")
torch.manual_seed(0)
model = wrapper(nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 2)))
if not isinstance(model, (fsdp2.FSDPModule, nn.DataParallel)):
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
