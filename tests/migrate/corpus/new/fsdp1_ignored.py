"""A frozen part that FSDP leaves alone, by modules and by states."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
import fsdp2


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
        # fsdp2: ignored_states is ignored_params: a set of parameters.
        # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
        #   mesh.
        model = fsdp2.parallelize(probe, wrap=None, ignored_params=set(probe.backbone.parameters()))
    else:
        # fsdp2: ignored_modules is ignored_params: the parameters of these modules.
        # fsdp2: device_id=torch.device("cpu") dropped: parallelize moves the model to the device of its
        #   mesh.
        model = fsdp2.parallelize(probe, wrap=None, ignored_params={param for module in [probe.backbone] for param in module.parameters()})
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
