"""Auto wrap by size: the smallest script that the FSDP1 tutorial describes."""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    BackwardPrefetch,
    CPUOffload,
)
from torch.distributed.fsdp.wrap import (
    enable_wrap,
    size_based_auto_wrap_policy,
    wrap,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 4)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def fsdp_main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    my_auto_wrap_policy = functools.partial(
        size_based_auto_wrap_policy, min_num_params=500
    )
    model = Net()

    # every layer above 500 elements becomes a unit
    model = FSDP(model, auto_wrap_policy=my_auto_wrap_policy, device_id=torch.device("cpu"), use_orig_params=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    for step in range(4):
        x, target = torch.randn(8, 16), torch.randint(4, (8,))
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    fsdp_main()
    dist.barrier()
    os._exit(0)
