"""An average of the weights, kept unsharded on every rank through summon_full_params."""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
ema = copy.deepcopy(net)
model = FSDP(net, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # move the average a little
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        for average, param in zip(ema.parameters(), model.parameters()):
            average.lerp_(param, 0.1)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} ema {sum(p.abs().sum() for p in ema.parameters()):.5f}", flush=True)
dist.barrier()
os._exit(0)
