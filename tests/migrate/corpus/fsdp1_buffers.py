"""Buffers in the dtype of the computation, as the tutorials' policies have it: a mask and a table that meet activations."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
cpu = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) * self.scale)


def build(net, precision=None):
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, device_id=cpu)


dist.init_process_group("gloo")
for make in (
    lambda net: build(net, bf16),
    lambda net: build(net),
):
    torch.manual_seed(0)
    model = make(nn.Sequential(Block(8), nn.BatchNorm1d(8), Block(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}", flush=True)

torch.manual_seed(1)
plain = FSDP(Block(8), mixed_precision=bf16, device_id=cpu)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for _ in range(2):
    loss = plain(torch.randn(4, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
os._exit(0)
