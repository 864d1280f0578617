"""DDP on a device of one's own, with accumulation and parameters that are not always used."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

ACCUMULATE = 2


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 2)])

    def forward(self, x, which):
        return self.heads[which](torch.tanh(self.body(x)))


class Trainer:
    def __init__(self, rank):
        torch.manual_seed(0)
        net = TwoHeads()
        self.ddp = nn.parallel.DistributedDataParallel(
            net,
            device_ids=None,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=5,
        )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.rank = rank

    def fit(self, steps):
        for step in range(steps):
            batches = [torch.randn(4, 6) for _ in range(ACCUMULATE)]
            with self.ddp.no_sync():
                for batch in batches[:-1]:
                    self.loss(batch, step).backward()
            loss = self.loss(batches[-1], step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.rank == 0:
                print(f"loss {loss.item():.6f}", flush=True)

    def loss(self, batch, step):
        return self.ddp(batch, (step + self.rank) % 2).square().mean() / ACCUMULATE


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
Trainer(dist.get_rank()).fit(4)
dist.barrier()
os._exit(0)
