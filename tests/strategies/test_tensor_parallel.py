"""Strategies over one axis of a larger mesh, beside tensor parallelism: the same training as without any."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import parallelize
from fsdp2.strategy import STRATEGIES
from harness import cpu_mesh, on_ranks


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def feeds() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Feed(), Feed())


@on_ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slice_of_a_mesh_beside_tensor_parallelism(strategy):
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    model, reference = feeds(), feeds()
    for feed in model:
        parallelize_module(feed, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    size = 2 if STRATEGIES[strategy].is_hybrid else None
    parallelize(model, strategy, mesh=mesh["dp"], shard_size=size)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, foreach=False) for each in (model, reference)]
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
        reference(x).square().mean().backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), reference.get_parameter(name), atol=1e-5, rtol=1e-5)
