"""Averages of the weights of a DDP model, made before it is wrapped: a copy, a dict by name, a class; and one made afterwards."""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Average:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()}

    def update(self, model):
        with torch.no_grad():
            for name, param in model.named_parameters():
                self.shadow[name].mul_(self.decay).add_(param, alpha=1 - self.decay)


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
copied = copy.deepcopy(net)
average = Average(net, 0.9)
named = {name: param.detach().clone() for name, param in net.named_parameters()}
model = DDP(net)
after = {name: param.detach().clone() for name, param in model.module.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
torch.manual_seed(dist.get_rank())
for step in range(4):
    loss = model(torch.randn(4, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model.module)
    with torch.no_grad():
        # the copy
        for mine, param in zip(copied.parameters(), model.module.parameters()):
            mine.lerp_(param, 0.1)
        for name, param in model.module.named_parameters():
            named[name].lerp_(param.data, 0.1)
        for name, param in model.module.named_parameters():
            after[name].lerp_(param, 0.1)
        if step == 2:  # goes on from the average
            for name, param in model.module.named_parameters():
                param.copy_(named[name])
    total = sum(each.abs().sum() for each in [*copied.parameters(), *average.shadow.values(), *named.values()])
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} average {float(total):.5f}", flush=True)
dist.barrier()
os._exit(0)
