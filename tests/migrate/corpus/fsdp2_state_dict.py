"""torch's FSDP2 from its first home, with the state dict API, unsharding by hand and accumulation."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


dist.init_process_group("gloo")
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(4):
    model.set_requires_gradient_sync(step % 2 == 1)
    model.unshard()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    if step % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
again = make()
set_model_state_dict(again, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
loss = again(torch.ones(1, 8)).square().mean()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
