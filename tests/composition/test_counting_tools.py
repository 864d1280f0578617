"""Tools that count collectives see with stock algorithms what they see of torch's FSDP2."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import profile

import fsdp2
from harness import cpu_mesh, on_ranks

COMPARISON = ("c10d.allreduce_", "c10d::allreduce_")  # of ranks, before a backward; torch's FSDP2 compares nothing


def model_of(shard) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])  # large enough for broadcasts, as measured
    for layer in model:
        shard(layer, mesh=cpu_mesh())
    return shard(model, mesh=cpu_mesh())


def step(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of outputs that are views
        model(torch.ones(2, 256)).square().sum().backward()


def counted(shard) -> Counter[str]:
    """What CommDebugMode counts in a second step."""
    model = model_of(shard)
    step(model)
    mode = CommDebugMode()
    with mode:
        step(model)
    return Counter({str(name): count for name, count in mode.get_comm_counts().items() if str(name) not in COMPARISON})


def profiled(shard) -> Counter[str]:
    """Names and numbers of torch.distributed's operators in a profile of a second step."""
    model = model_of(shard)
    step(model)
    with profile() as recorded:
        step(model)
    names = [event.name for event in recorded.events()]
    return Counter(name for name in names if name.startswith("c10d::") and name not in COMPARISON)


@on_ranks(2)
@pytest.mark.parametrize("count", [counted, pytest.param(profiled, marks=pytest.mark.slow)])
def test_stock_algorithms_are_counted_as_those_of_torchs_fsdp2(count):
    fsdp2.set_collective_algorithms("stock")
    try:
        ours = count(fsdp2.fully_shard)
    finally:
        fsdp2.set_collective_algorithms("measured")
    assert ours == count(torch_fully_shard)
    assert sorted(ours.values()) == [3, 6]  # a reduce-scatter for each unit; a gather in forward, and one in backward
    assert ours != count(fsdp2.fully_shard)


@on_ranks(2)
def test_ranks_are_compared_before_a_backward_with_stock_algorithms_too():
    fsdp2.set_collective_algorithms("stock")
    try:
        model = model_of(fsdp2.fully_shard)
        step(model)
        first, _, last = model
        x = torch.ones(2, 256, requires_grad=True)
        outputs = first(x), last(x)
        with pytest.raises(fsdp2.OrderError):
            outputs[dist.get_rank()].sum().backward()
    finally:
        fsdp2.set_collective_algorithms("measured")


def test_an_unknown_choice_is_refused():
    with pytest.raises(fsdp2.ArgumentError, match="stock"):
        fsdp2.set_collective_algorithms("fast")
