"""Every way to gather and every algorithm of every collective gives the unsharded model's numbers."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import with_reference
from harness.training import (
    assert_equal_training,
    assert_same_bits,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    forced,
)

GATHERS = ["direct", "packed", "mixed"]
ALL_GATHERS = ["stock", "broadcast", "exchange"]
REDUCE_SCATTERS = ["stock", "all_to_all", "all_reduce", "exchange"]
ALL_REDUCES = ["stock", "exchange"]
IN_RANK_ORDER = {"all_to_all", "exchange"}


def even(dim: int = 12) -> nn.Module:
    """Beside the rows that do not divide, some that divide over 2, 3 and 4 ranks: only these are gathered directly."""
    return nn.Sequential(mlp(dim), nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 12), nn.Linear(12, 3))


def shard(model: nn.Sequential, mesh) -> nn.Module:
    for block in model[0].blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check(options: dict[str, str], mesh, bitwise: bool) -> None:
    model, reference = with_reference(even())
    with forced(**options):
        shard(model, mesh)
    steps = fed_own_chunk(model, batches())
    if bitwise:
        assert_same_bits(steps, fed_in_chunks(reference, batches()))
    else:
        assert_equal_training(steps, fed_whole(reference, batches()))


@on_ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("gather", "all_gather"),
    [("direct", "stock"), ("direct", "exchange"), ("packed", "broadcast"), ("packed", "exchange"), ("mixed", "stock")],
)
def test_every_gather_plan_and_every_all_gather_is_exact(gather, all_gather):
    check({"gather": gather, "all_gather": all_gather}, cpu_mesh(), bitwise=True)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("reduce_scatter", REDUCE_SCATTERS)
def test_every_reduce_scatter_averages(reduce_scatter, world_size):
    # Between two ranks there is one order of addition; among more, what adds in rank order is exact.
    check({"reduce_scatter": reduce_scatter}, cpu_mesh(), bitwise=world_size == 2 or reduce_scatter in IN_RANK_ORDER)


@on_ranks(4)
@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_every_all_reduce_averages_over_the_replicas(all_reduce, shape):
    adds_in_rank_order = shape == (1, 4) or (shape == (4, 1) and all_reduce == "exchange")
    check({"all_reduce": all_reduce}, cpu_mesh(*shape), bitwise=adds_in_rank_order)


@pytest.mark.slow
@on_ranks(2, 3, 4)
@pytest.mark.parametrize(("gather", "all_gather", "reduce_scatter"), list(itertools.product(GATHERS, ALL_GATHERS, REDUCE_SCATTERS)))
def test_every_combination_of_plan_and_collectives(gather, all_gather, reduce_scatter, world_size):
    options = {"gather": gather, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
    check(options, cpu_mesh(), bitwise=world_size == 2 or reduce_scatter in IN_RANK_ORDER)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize(
    ("gather", "all_gather", "reduce_scatter", "all_reduce"),
    list(itertools.product(GATHERS, ALL_GATHERS, REDUCE_SCATTERS, ALL_REDUCES)),
)
def test_every_combination_on_a_mesh_of_two_by_two(gather, all_gather, reduce_scatter, all_reduce):
    options = {"gather": gather, "all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    assert dist.get_world_size() == 4
    check(options, cpu_mesh(2, 2), bitwise=False)
