"""NO_SHARD, chosen by a flag, and the wrapped module's own methods."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
import fsdp2


class Net(nn.Sequential):
    def regularizer(self):
        return torch.tensor(0.25)


parser = argparse.ArgumentParser()
parser.add_argument("--replicate", action="store_true", default=True)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
# fsdp2: NO_SHARD is the ddp strategy: nothing is sharded.
# fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
#   mesh.
# fsdp2: use_orig_params=True dropped: parameters always are the original ones, sharded.
model = fsdp2.parallelize(
    net,
    wrap=None,
    strategy="ddp" if args.replicate else "zero3",
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 5)).abs().mean() + model.regularizer()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
