"""Layers wrapped one by one in a loop, then activation checkpointing."""
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Stack()
for i, layer in enumerate(model.layers):
    model.layers[i] = FSDP(layer, device_id=torch.device("cpu"))
model = FSDP(model, device_id=torch.device("cpu"))
apply_activation_checkpointing(
    model,
    checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    check_fn=lambda module: isinstance(module, Block),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
dist.barrier()
os._exit(0)
