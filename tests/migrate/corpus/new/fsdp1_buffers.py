"""Buffers in the dtype of the computation, as the tutorials' policies have it: a mask and a table that meet activations."""
import os

import torch
import torch.distributed as dist
from torch import nn
import fsdp2

# fsdp2: buffer_dtype=torch.bfloat16 is a cast of the buffers beside parallelize; state dicts have
#   them in that dtype, too.
bf16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
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
    # fsdp2: device_id=cpu dropped: parallelize moves the model to the device of its mesh.
    if precision is not None:
        for buffer in net.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(torch.bfloat16)
    return fsdp2.parallelize(net, wrap=fsdp2.wrap.by_class(Block), mp_policy=precision or fsdp2.MixedPrecisionPolicy())


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
# fsdp2: device_id=cpu dropped: parallelize moves the model to the device of its mesh.
plain = fsdp2.parallelize(Block(8), wrap=None, mp_policy=bf16)
for buffer in plain.buffers():
    if buffer.is_floating_point():
        buffer.data = buffer.data.to(torch.bfloat16)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for _ in range(2):
    loss = plain(torch.randn(4, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
os._exit(0)
