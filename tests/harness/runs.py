"""A training run with everything that a checkpoint has to restore."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer

from .mesh import cpu_mesh


class Net(nn.Module):
    """Dropout needs the generators, batch norm has buffers, the last layer's rows do not divide."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.Linear(width, 6)) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


class Loader:
    """Draws batches from a generator of its own, as a data loader with a state does."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        return torch.randn(4, 6, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Run:
    """Everything that a training has; ``seed`` decides all values that a checkpoint has to restore."""

    def __init__(self, folder: Path, seed: int = 0, mesh: DeviceMesh | None = None, width: int = 8, **options: Any) -> None:
        mesh = mesh or cpu_mesh()
        torch.manual_seed(seed)
        self.model = Net(width)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        torch.manual_seed(seed + dist.get_rank())
        random.seed(seed + dist.get_rank())
        np.random.seed(seed + dist.get_rank())
        self.loader = Loader(seed + dist.get_rank())
        self.folder = folder
        options = {"data": self.loader} | options
        self.checkpointer = Checkpointer(folder, self.model, self.optimizer, self.scheduler, **options)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpointer.close()

    def step(self) -> float:
        noise = random.random() + float(np.random.rand())
        loss = self.model(next(self.loader)).square().mean() * (1 + noise)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def steps(self, number: int) -> list[float]:
        return [self.step() for _ in range(number)]

    def state(self) -> dict[str, Tensor]:
        """Copies of this rank's part of model and optimizer."""
        return {name: (value.to_local() if isinstance(value, DTensor) else value).clone() for name, value in self._values().items()}

    def full_state(self) -> dict[str, Tensor]:
        """Copies of all of it. Collective: yes, over the mesh."""
        return {name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in self._values().items()}

    def _values(self) -> dict[str, Tensor]:
        values = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, each in self.optimizer.state_dict()["state"].items():
            values |= {f"optimizer.{number}.{key}": value for key, value in each.items()}
        return values


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
