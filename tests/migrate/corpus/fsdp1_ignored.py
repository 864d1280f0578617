"""A frozen part that FSDP leaves alone, by modules and by states."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 6).requires_grad_(False)
        self.adapter = nn.Linear(6, 6)
        self.scale = nn.Linear(1, 6)

    def forward(self, x):
        return self.adapter(self.backbone(x)) * self.scale(x[:, :1])


def main(by_states: bool):
    torch.manual_seed(0)
    probe = Probe()
    if by_states:
        model = FSDP(probe, ignored_states=list(probe.backbone.parameters()), device_id=torch.device("cpu"))
    else:
        model = FSDP(probe, ignored_modules=[probe.backbone], device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        loss = model(torch.randn(3, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}", flush=True)


dist.init_process_group("gloo")
main(False)
main(True)
dist.barrier()
sys.stdout.flush()
os._exit(0)
