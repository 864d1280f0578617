"""NO_SHARD, chosen by a flag, and the wrapped module's own methods."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


class Net(nn.Sequential):
    def regularizer(self):
        return torch.tensor(0.25)


parser = argparse.ArgumentParser()
parser.add_argument("--replicate", action="store_true", default=True)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
model = FSDP(
    net,
    sharding_strategy=ShardingStrategy.NO_SHARD if args.replicate else ShardingStrategy.FULL_SHARD,
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 5)).abs().mean() + model.module.regularizer()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
