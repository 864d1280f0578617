"""Auto wrap by size: the smallest script that the FSDP1 tutorial describes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import fsdp2


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
    my_auto_wrap_policy = fsdp2.wrap.by_size(500)
    model = Net()

    # every layer above 500 elements becomes a unit
    # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
    #   mesh.
    # fsdp2: use_orig_params=True dropped: parameters always are the original ones, sharded.
    model = fsdp2.parallelize(model, wrap=my_auto_wrap_policy)

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
