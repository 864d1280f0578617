"""Ranks whose backwards reach different units: every rank raises, by the name of the unit, before a gradient is communicated."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import OrderError, fully_shard, parallelize
from harness import cpu_mesh, on_ranks
from harness.models import batches
from harness.training import assert_equal_grads, grads_of, own_chunk

DIM = 7


class Block(nn.Module):
    """``frozen``: this rank's forward leaves the parameters out of the graph."""

    def __init__(self, out: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, out)

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        if frozen:
            with torch.no_grad():
                return self.linear(x)
        return self.linear(x)


class Model(nn.Module):
    """Runs the blocks of ``route``, after a first layer of the root's; blocks of equal sizes would swap gradients unnoticed."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor, route: list[int], frozen: int | None = None) -> Tensor:
        x = self.first(x)
        for index in route:
            x = x + self.blocks[index](x, frozen == index)
        return x


EVERY = [0, 1, 2, 3]
STRATEGIES = ["ddp", "zero1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero2", "zero3"))]


def models(strategy: str) -> tuple[nn.Module, Model]:
    torch.manual_seed(0)
    reference = Model()
    return parallelize(copy.deepcopy(reference), strategy, wrap={Block}), reference


def step(model: nn.Module, x: Tensor, route: list[int], frozen: int | None = None) -> None:
    model(x, route, frozen).square().mean().backward()


def check_step(model: nn.Module, reference: Model, x: Tensor) -> None:
    model.zero_grad()
    reference.zero_grad()
    step(model, own_chunk(x), EVERY)
    step(reference, x, EVERY)
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


ROUTES = {
    "a block in the middle": ([0, 2, 3], r"(?s)1 units.*blocks\.1: .*ranks \[0\] does not have it"),
    "the last block": ([0, 1, 2], r"blocks\.3: .*ranks \[0\] does not have it"),
    "the first block": ([1, 2, 3], r"blocks\.0: .*ranks \[0\] does not have it"),
    "all blocks": ([], r"(?s)4 units.*blocks\.0: .*blocks\.3: "),
}


@on_ranks(2, 3, timeout=60)
@pytest.mark.parametrize("route", ROUTES)
def test_a_rank_that_does_not_call_a_group_is_an_error_by_name_on_every_rank(route):
    model, reference = models("ddp")
    x, *_ = batches(1)
    check_step(model, reference, x)
    model.zero_grad()
    mine, words = ROUTES[route]
    with pytest.raises(OrderError, match=words):
        step(model, own_chunk(x), mine if dist.get_rank() == 0 else EVERY)
    assert all(param.grad is None for param in model.parameters())
    model.reset_iter_state()
    check_step(model, reference, x)


@on_ranks(2, 3, timeout=60)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_leaves_out_one_block_is_an_error_by_name_where_forward_gathers_too(strategy):
    """The block that is left out is gathered all the same: it was prefetched."""
    model, reference = models(strategy)
    x, *_ = batches(1)
    check_step(model, reference, x)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    with pytest.raises(OrderError, match=r"blocks\.1: .*ranks \[0\] does not have it"):
        step(model, own_chunk(x), [0, 2, 3] if dist.get_rank() == 0 else EVERY)
    model.reset_iter_state()
    check_step(model, reference, x)


@on_ranks(2, timeout=60)
def test_ranks_that_call_groups_in_different_orders_are_told():
    model, reference = models("ddp")
    x, *_ = batches(1)
    with pytest.raises(OrderError, match="ranks ran units in different orders"):
        step(model, own_chunk(x), [0, 2, 1, 3] if dist.get_rank() == 0 else EVERY)
    model.reset_iter_state()
    check_step(model, reference, x)


@on_ranks(4, timeout=60)
@pytest.mark.slow
def test_every_rank_of_replicas_of_shards_is_told():
    torch.manual_seed(0)
    reference = Model()
    model = copy.deepcopy(reference)
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=cpu_mesh(2, 2), reshard_after_forward=False)
    x, *_ = batches(1)
    check_step(model, reference, x)
    with pytest.raises(OrderError, match=r"blocks\.1: .*ranks \[1\] does not have it"):
        step(model, own_chunk(x), [0, 2, 3] if dist.get_rank() == 1 else EVERY)
    model.reset_iter_state()
    check_step(model, reference, x)


@on_ranks(2, 3, timeout=60)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_that_is_frozen_on_one_branch_is_an_error_by_name(strategy, unused):
    model, reference = models(strategy)
    model.set_reduce_scatter_unused_params(unused)
    x, *_ = batches(1)
    for frozen in (1, 3):
        with pytest.raises(OrderError, match=rf"blocks\.{frozen}: .*ranks \[0\] does not have it"):
            step(model, own_chunk(x), EVERY, frozen if dist.get_rank() == 0 else None)
        model.reset_iter_state()
        check_step(model, reference, x)


@on_ranks(2, timeout=60)
def test_micro_batches_without_communication_may_call_different_groups():
    model, reference = models("ddp")
    x, y = batches(2)
    routes = [[0, 2], [1, 3, 2]]
    model.set_requires_gradient_sync(False)
    step(model, own_chunk(x), routes[dist.get_rank()])
    model.set_requires_gradient_sync(True)
    step(model, own_chunk(y), EVERY)
    for rank, chunk in enumerate(x.chunk(2)):
        (reference(chunk, routes[rank]).square().mean() / 2).backward()
    step(reference, y, EVERY)
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


@on_ranks(2, timeout=60)
def test_one_rank_may_run_forward_alone_where_parameters_are_kept():
    """To log or to draw a picture: without a backward nothing is reduced."""
    model, reference = models("ddp")
    x, *_ = batches(1)
    if dist.get_rank() == 0:
        model(own_chunk(x), [3, 1])
    check_step(model, reference, x)
