"""Gradients compressed by one of torch's hooks; the best model is saved, by the first rank, every second step."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), tempfile.mkdtemp()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)), broadcast_buffers=False)
model.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(4):
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 2 == 1:
        torch.save(model.state_dict(), os.path.join(folder, f"{step}.pt"))
    if rank == 0:
        print(f"loss {loss.item():.3f} files {len(os.listdir(folder))}", flush=True)
dist.barrier()
os._exit(0)
