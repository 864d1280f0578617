"""Gradients compressed by one of torch's hooks; the best model is saved, by the first rank, every second step."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
import fsdp2.checkpoint

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), tempfile.mkdtemp()
torch.manual_seed(0)
# fsdp2: broadcast_buffers=False dropped: buffers are broadcast once, at the start, and then are
#   each rank's own; torch.nn.SyncBatchNorm keeps the statistics of batch norms equal.
model = fsdp2.parallelize(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)), "ddp", mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float16))
# fsdp2: register_comm_hook dropped: parallelize reduces gradients in torch.float16, mp_policy's
#   reduce_dtype.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(4):
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model_state = fsdp2.checkpoint.full_state_dict(model) if step % 2 == 1 else None
    if rank == 0 and step % 2 == 1:
        # fsdp2: keys no longer begin with module.
        torch.save(model_state, os.path.join(folder, f"{step}.pt"))
    if rank == 0:
        print(f"loss {loss.item():.3f} files {len(os.listdir(folder))}", flush=True)
dist.barrier()
os._exit(0)
