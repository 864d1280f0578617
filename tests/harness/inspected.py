"""A small training whose steps are written down, and a folder that all ranks see."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard


def folder_for_all() -> Path:
    """A new one. Collective: yes."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return Path(str(told[0]))


def training(width: int = 64, rows: int = 2, bias: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Three layers, units "0" to "2", and AdamW; the third is a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=bias) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(rows, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
