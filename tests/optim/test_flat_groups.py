"""A flat optimizer whose groups the user edits, and copies of one; the ordinary optimizer is the oracle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from fsdp2.optim import DiskOffloadPolicy, flat, offloaded
from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks


def sharded() -> nn.Module:
    model = mlp()
    return shard_blocks(model)


def train(model: nn.Module, optimizer: Optimizer, data: list[Tensor]) -> None:
    for x in data:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.detach().full_tensor(), theirs.detach().full_tensor()), name


@on_ranks(2)
@pytest.mark.parametrize("kind", ["flat", "offloaded"])
def test_a_copy_of_a_model_and_its_optimizer_trains_on_as_they_do(kind, tmp_path):
    """By ``deepcopy``, which raised AttributeError: ``__setstate__`` asked for the class that the new object did not have yet."""
    model, ordinary = sharded(), sharded()
    expected = AdamW(ordinary.parameters(), lr=0.01)
    optimizer: Any = flat(AdamW, model, lr=0.01)
    if kind == "offloaded":
        optimizer = offloaded(AdamW, model, DiskOffloadPolicy(tmp_path), lr=0.01)
    train(model, optimizer, batches(3))
    train(ordinary, expected, batches(3))
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    assert type(its_optimizer) is type(optimizer)
    assert its_optimizer.param_groups[0]["params"][0] is next(copied.parameters())
    train(model, optimizer, batches(1))
    assert its_optimizer.state[next(copied.parameters())]["step"] == 3
    train(ordinary, expected, batches(2))
    train(copied, its_optimizer, batches(2))
    assert_same(copied, ordinary)
    assert repr(copy.deepcopy(optimizer)) == repr(optimizer)


def test_a_pickled_flat_optimizer_steps_on_its_own_copies():
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(5, 3))
    optimizer = flat(AdamW, [param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    (again,) = (pickle.loads(pickle.dumps(optimizer)),)
    (copied,) = again.param_groups[0]["params"]
    for each, its_optimizer in ((param, optimizer), (copied, again)):
        each.grad = torch.full_like(each, 2)
        its_optimizer.step()
    assert copied is not param
    assert torch.equal(copied, param)


@on_ranks(2)
def test_a_parameter_that_is_taken_out_of_the_groups_and_put_back_goes_on_where_it_was():
    """Its state was forgotten, so that its moments began anew."""

    def run(make: Any) -> nn.Module:
        model = sharded()
        optimizer = make(model)
        train(model, optimizer, batches(2))
        params = optimizer.param_groups[0]["params"]
        taken = params.pop(1)
        train(model, optimizer, batches(2))
        params.insert(1, taken)
        train(model, optimizer, batches(2))
        return model

    ours, theirs = run(lambda model: flat(AdamW, model, lr=0.01)), run(lambda model: AdamW(model.parameters(), lr=0.01))
    assert isinstance(next(ours.parameters()), DTensor)
    assert_same(ours, theirs)


@on_ranks(2)
def test_an_optimizer_whose_groups_were_cleared_steps_on_nothing_until_others_are_added():
    def run(make: Any) -> nn.Module:
        model = sharded()
        optimizer = make(model)
        train(model, optimizer, batches(2))
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        train(model, optimizer, batches(1))
        for group in groups:
            optimizer.add_param_group({"params": group["params"], "lr": 0.02})
        train(model, optimizer, batches(2))
        return model

    assert_same(run(lambda model: flat(AdamW, model, lr=0.01)), run(lambda model: AdamW(model.parameters(), lr=0.01)))
