"""Parameters of any shape, memory format and dtype train as in the unsharded model, cut along any dim."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import with_reference
from harness.training import (
    adamw,
    assert_equal_training,
    assert_same_bits,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    forced,
    sgd,
)


def check(model: nn.Module, inputs: list[Tensor], optimizer=sgd, **options) -> nn.Module:
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    fully_shard(model, mesh=cpu_mesh(), **options)
    steps = fed_own_chunk(model, inputs, optimizer)
    assert_same_bits(steps, fed_in_chunks(reference, inputs, optimizer))
    assert_equal_training(steps, fed_whole(whole, inputs, optimizer))
    return model


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 9])
def test_rows_that_are_fewer_than_ranks_or_do_not_divide(rows):
    check(nn.Sequential(nn.Linear(7, rows), nn.Tanh(), nn.Linear(rows, 5)), batches())


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("gather", ["direct", "packed", "mixed"])
def test_a_cut_along_the_last_dim(gather):
    with forced(gather=gather):
        model = check(mlp(dim=9), batches(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    for param in model.parameters():
        assert param.placements == (Shard(1 if param.ndim == 2 else 0),)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("columns", [1, 2, 3, 7])
def test_columns_that_are_fewer_than_ranks_or_do_not_divide(columns):
    model = nn.Sequential(nn.Linear(7, columns), nn.Tanh(), nn.Linear(columns, 5))
    check(model, batches(), shard_placement_fn=lambda p: Shard(p.ndim - 1))


@on_ranks(2, 3)
def test_negative_dims_of_shard_placement_fn_count_from_the_end():
    model = check(mlp(), batches(), shard_placement_fn=lambda p: Shard(-1))
    assert model.first.weight.placements == (Shard(1),)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_three_dimensional_parameter_cut_along_each_dim(dim):
    check(ThreeDims(), batches(shape=(12, 4)), shard_placement_fn=lambda p: Shard(dim) if p.ndim == 3 else None)


class ThreeDims(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, 4, 3))
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.einsum("bi,eij->bej", x, self.experts).tanh())


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(7, 5)
        self.shift = nn.Parameter(torch.tensor(-0.25))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.temperature) + self.shift


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("gather", ["direct", "packed", "mixed"])
def test_parameters_without_dims_are_the_same_on_every_rank(gather):
    with forced(gather=gather):
        model = check(Scalars(), batches())
    assert model.temperature.shape == ()
    assert model.temperature.placements == (Replicate(),)


@on_ranks(2, 3)
def test_a_parameter_without_elements_is_left_in_peace():
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 6, 2)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.linear(x.mean((2, 3)))


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_channels_last_parameters_keep_their_memory_format(dim, optimizer):
    model, whole = with_reference(Convolution().to(memory_format=torch.channels_last))
    inputs = [x.to(memory_format=torch.channels_last) for x in batches(shape=(12, 3, 5, 5))]
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=lambda p: Shard(dim) if p.ndim == 4 else None)
    local = model.first.weight.to_local()
    assert local.numel() == 0 or local.is_contiguous(memory_format=torch.channels_last)
    shapes = []
    model.first.register_forward_pre_hook(lambda module, args: shapes.append(module.weight.stride()))
    # mkldnn adds in an order that depends on the address: bits are not to be had, bounds are.
    steps = fed_own_chunk(model, inputs, optimizer)
    assert_equal_training(steps, fed_whole(whole, inputs, optimizer), ulps=64)
    assert set(shapes) == {whole.first.weight.stride()}


class Transposed(nn.Module):
    """A weight that is stored transposed, and one that is every other column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(7, 6).t())
        self.strided = nn.Parameter(torch.randn(5, 12)[:, ::2])
        assert not self.transposed.is_contiguous()
        assert not self.strided.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, self.transposed)), self.strided)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_that_are_not_contiguous(dim):
    model, whole = with_reference(Transposed(), fully_shard, mesh=cpu_mesh(), shard_placement_fn=lambda p: Shard(dim))
    steps = fed_own_chunk(model, batches())
    assert_equal_training(steps, fed_whole(whole, batches()))


class TwoDtypes(nn.Module):
    """Parameters in fp32, bf16 and fp64 in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.second = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.third = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.tanh(self.first(x)).bfloat16()).double())


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_parameters_of_several_dtypes_in_one_call(optimizer):
    # 1, 2 and 4 ranks: dividing by a power of two is exact in every dtype.
    model, reference = with_reference(TwoDtypes(), fully_shard, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches(), optimizer)
