"""DDP on a device of one's own, with accumulation and parameters that are not always used."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import fsdp2

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
        # fsdp2: device_ids=None dropped: parallelize moves the model to the device of its mesh.
        # fsdp2: find_unused_parameters=True is wrap=None, one group: a rank may leave out modules that
        #   others call. Where all ranks call the same modules, drop it: several groups are reduced while
        #   backward goes on.
        # fsdp2: gradient_as_bucket_view=True dropped: gradients always are views of the reduced buffer.
        # fsdp2: bucket_cap_mb=5 dropped: fsdp2 reduces groups of parameters; wrap= chooses them.
        self.ddp = fsdp2.parallelize(
            net,
            "ddp",
            wrap=None,
        )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.rank = rank

    def fit(self, steps):
        for step in range(steps):
            batches = [torch.randn(4, 6) for _ in range(ACCUMULATE)]
            with fsdp2.accumulate(self.ddp):
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
