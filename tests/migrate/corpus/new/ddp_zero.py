"""DDP whose optimizer state is sharded by ZeroRedundancyOptimizer."""
import os

import torch
import torch.distributed as dist
from torch import nn
import fsdp2.checkpoint


def is_main_process():
    return dist.get_rank() == 0


dist.init_process_group("gloo")
torch.manual_seed(0)
# fsdp2: static_graph=True dropped: nothing has to be known about the graph.
model = fsdp2.parallelize(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), "zero1")
# fsdp2: parameters_as_bucket_view=True dropped: the optimizer sees sharded parameters; nothing to
#   choose.
# fsdp2: ZeroRedundancyOptimizer is the strategy "zero1" with the plain optimizer.
optimizer = torch.optim.Adam(
    model.parameters(),
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
# fsdp2: consolidate_state_dict dropped: full_optimizer_state_dict gathers, on every rank.
optimizer_state = fsdp2.checkpoint.full_optimizer_state_dict(model, optimizer, by_name=True)
if is_main_process():
    # fsdp2: state by parameter name, not by number; a file that the old script wrote has numbers.
    state = optimizer_state
    print("parameters with state", len(state["state"]), flush=True)
dist.barrier()
os._exit(0)
