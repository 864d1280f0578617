"""A policy function of one's own, which sees how much is left: only FSDP1's recursion can call it."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision


def half_of_it(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    if recurse:
        return True
    return isinstance(module, nn.Linear) and nonwrapped_numel > 40


dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(
    nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
    auto_wrap_policy=half_of_it,
    mixed_precision=MixedPrecision(),
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
