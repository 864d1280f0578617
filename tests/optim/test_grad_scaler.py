"""``fsdp2.optim.GradScaler``: all ranks skip the same steps, also for what no DTensor speaks of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.optim import GradScaler, flat
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks


class WithPlain(nn.Module):
    """``plain`` is not sharded, and every rank has its own gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3, bias=False)
        self.plain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.plain


@on_ranks(2)
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("where", ["plain", "sharded", "nowhere"])
def test_infinity_on_one_rank_skips_the_step_on_all(is_flat: bool, where: str) -> None:
    model = WithPlain()
    fully_shard(model, mesh=cpu_mesh(2), ignored_params={model.plain})
    optimizer = flat(torch.optim.SGD, model, lr=1.0) if is_flat else torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    before = [model.plain.detach().clone(), model.linear.weight.full_tensor().clone()]
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    if dist.get_rank() == 1 and where != "nowhere":
        grad = model.plain.grad if where == "plain" else model.linear.weight.grad.to_local()
        grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    skips = [torch.equal(old, new) for old, new in zip(before, (model.plain.detach(), model.linear.weight.full_tensor()), strict=True)]
    assert skips == [where != "nowhere"] * 2
    assert scaler.get_scale() == (2.0 if where != "nowhere" else 8.0)


@on_ranks(2)
def test_of_two_optimizers_only_the_one_with_the_infinity_skips() -> None:
    model = mlp()
    shard_blocks(model, mesh=cpu_mesh(2))
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [flat(torch.optim.SGD, first, lr=1.0), flat(torch.optim.SGD, second, lr=1.0)]
    scaler = GradScaler("cpu", init_scale=4.0)
    before = [param.full_tensor().clone() for param in (first[0], second[0])]
    scaler.scale(model(batches(1)[0]).sum()).backward()
    if dist.get_rank() == 0:
        first[0].grad.to_local().fill_(float("nan"))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(first[0].full_tensor(), before[0])
    assert not torch.equal(second[0].full_tensor(), before[1])


@on_ranks(2)
def test_its_state_dict_is_torchs() -> None:
    ours, theirs = GradScaler("cpu", init_scale=32.0), torch.amp.GradScaler("cpu", init_scale=32.0)
    assert ours.state_dict() == theirs.state_dict()
    other = GradScaler("cpu")
    other.load_state_dict(ours.state_dict())
    assert other.get_scale() == 32.0
