"""Programs whose parts don't go together: each is an error of ours, on every rank, that names the parameter and the fix."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import OrderError, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp

X = batches(1)[0]


class WithAdapter(nn.Module):
    """A layer and a low-rank one next to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@on_ranks(2)
def test_a_wrapper_that_came_after_fully_shard_cannot_take_what_is_sharded():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    model.last = WithAdapter(model.last)
    with pytest.raises(OrderError, match=r"(?s)2 parameters were sharded by an earlier.*base.weight.*base.bias.*fix:"):
        fully_shard(model.last, mesh=cpu_mesh())
    for added in (model.last.down, model.last.up):  # as the error says
        fully_shard(added, mesh=cpu_mesh())
    model(X).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_late_tie_cannot_be_sharded_again():
    model = fully_shard(mlp(), mesh=cpu_mesh())
    other = nn.Linear(10, 5)
    other.weight = model.last.weight
    with pytest.raises(OrderError, match=r"1 parameters were sharded by an earlier"):
        fully_shard(other, mesh=cpu_mesh())
    dist.barrier()
