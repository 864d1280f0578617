"""Automatic wrapping by size, in place of DistributedDataParallel: an ordinary training loop around ``FSDP(model, policy)``."""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(8, 4)
        self.layer2 = nn.Linear(4, 16)
        self.layer3 = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


def batches(num_steps):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(num_steps):
        yield torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def main(device):
    torch.manual_seed(0)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=60)
    model = FSDP(Model(), auto_wrap_policy=policy, device_id=device)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for sample, label in batches(5):
        out = model(sample.to(device))
        loss = nn.functional.mse_loss(out, label.to(device))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main(torch.device("cpu")))
