"""Blocks are sharded and the model around them is not: its own parameters are in no unit, and nobody averages their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from fsdp2 import fully_shard
from fsdp2.optim import flat
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.user_warnings import warned_on_rank_0

X = batches(1)[0]
OWN = ["first.weight (10, 7)", "first.bias (10,)", "last.weight (5, 10)", "last.bias (5,)"]


def with_sharded_blocks(**options: Any) -> nn.Module:
    model = mlp()
    for block in model.blocks:
        fully_shard(block, **{"mesh": cpu_mesh()} | options)
    return model


def own(model: nn.Module) -> list[nn.Parameter]:
    return [*model.first.parameters(), *model.last.parameters()]


def optimizers_of(model: nn.Module) -> dict[str, Callable[[], list[Optimizer]]]:
    return {
        "one optimizer": lambda: [SGD(model.parameters(), lr=0.1)],
        "one for the blocks, one for the rest": lambda: [SGD(model.blocks.parameters(), lr=0.1), SGD(own(model), lr=0.1)],
        "the rest first": lambda: [SGD(own(model), lr=0.1), SGD(model.blocks.parameters(), lr=0.1)],
        "flat": lambda: [flat(SGD, model, lr=0.1)],
    }


def train(model: nn.Module, optimizers: list[Optimizer], num_steps: int = 2) -> None:
    for _ in range(num_steps):
        model(X + dist.get_rank()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_each_forgotten_root_is_warned_of_once_at_its_first_step_and_its_parameters_do_differ():
    for name in optimizers_of(mlp()):
        model = with_sharded_blocks()
        optimizers = optimizers_of(model)[name]()
        with warned_on_rank_0(UserWarning, "never called on MLP") as shown:
            train(model, optimizers)
            other = fully_shard(mlp(), mesh=cpu_mesh())
            train(other, [SGD(other.parameters(), lr=0.1)])  # looks at the modules again, and at the same model
            train(model, [SGD(model.parameters(), lr=0.1)])
        assert len(shown) == (dist.get_rank() == 0), name
        for each in shown:
            assert all(text in str(each.message) for text in OWN), name
        weights = [torch.empty_like(model.first.weight) for _ in range(2)]
        dist.all_gather(weights, model.first.weight.detach())
        assert not torch.equal(*weights), name  # so the warning is right


def by_closure(model: nn.Module, optimizer: Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


def without_gradients_at_first(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    train(model, [optimizer])


def thawed_later(model: nn.Module, optimizer: Optimizer) -> None:
    for trains in (False, True):
        for param in own(model):
            param.requires_grad_(trains)
        train(model, [optimizer])


@on_ranks(2)
def test_parameters_that_get_their_first_gradient_within_a_step_or_after_several_are_warned_of():
    """Symptom: an optimizer was looked at before its first step alone. A closure has computed nothing by then."""
    for way, optimizer in itertools.product((by_closure, without_gradients_at_first, thawed_later), (SGD, flat)):
        model = with_sharded_blocks()
        with warned_on_rank_0(UserWarning, "never called on MLP") as shown:
            made = flat(SGD, model, lr=0.1) if optimizer is flat else optimizer(model.parameters(), lr=0.1)
            for _ in range(2):
                way(model, made)
        assert len(shown) == (dist.get_rank() == 0), (way, optimizer)
        for each in shown:
            assert all(text in str(each.message) for text in OWN), (way, optimizer)


@on_ranks(2)
def test_as_an_error_it_is_raised_on_every_rank():
    model = with_sharded_blocks()
    with pytest.raises(UserWarning, match="fully_shard was never called on MLP"):
        train(model, [SGD(model.parameters(), lr=0.1)])
    dist.barrier()


class WithCritic(nn.Module):
    """A sharded model, and another that DDP averages."""

    def __init__(self) -> None:
        super().__init__()
        self.model = fully_shard(mlp(), mesh=cpu_mesh())
        self.critic = DistributedDataParallel(nn.Linear(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.model(x))


def with_frozen_rest() -> nn.Module:
    model = with_sharded_blocks()
    for param in own(model):
        param.requires_grad_(False)
    return model


def with_ignored() -> nn.Module:
    model = mlp()
    return fully_shard(model, mesh=cpu_mesh(), ignored_params=set(model.first.parameters()))


def of_one_rank_each() -> nn.Module:
    mesh = cpu_mesh(2, 1, names=("pp", "dp"))
    return with_sharded_blocks(mesh=mesh["dp"])


@on_ranks(2)
def test_what_nobody_need_average_or_somebody_else_does_is_not_warned_of():
    for build in (WithCritic, with_frozen_rest, with_ignored, of_one_rank_each, mlp):
        model = build()
        train(model, [SGD(model.parameters(), lr=0.1)])


@on_ranks(2)
def test_modules_are_searched_once_however_many_optimizers_step():
    model = with_sharded_blocks()
    other = mlp()  # trained next to it, by an optimizer for each parameter
    optimizers = [SGD([param], lr=0.1) for param in other.parameters()]
    with mock.patch("gc.get_objects", wraps=__import__("gc").get_objects) as search:
        train(other, optimizers)
        train(fully_shard(mlp(), mesh=cpu_mesh()), optimizers[:1])
    assert search.call_count == 1
    del model
