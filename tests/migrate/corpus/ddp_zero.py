"""DDP whose optimizer state is sharded by ZeroRedundancyOptimizer."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def is_main_process():
    return dist.get_rank() == 0


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), static_graph=True)
optimizer = ZeroRedundancyOptimizer(
    model.parameters(),
    optimizer_class=torch.optim.Adam,
    parameters_as_bucket_view=True,
    lr=0.01,
)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_main_process():
        print(f"loss {loss.item():.6f}", flush=True)
optimizer.consolidate_state_dict(to=0)
if is_main_process():
    state = optimizer.state_dict()
    print("parameters with state", len(state["state"]), flush=True)
dist.barrier()
os._exit(0)
