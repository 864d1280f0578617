"""Losses, gradients and parameters of a few steps are those of the unsharded model: every optimizer, one group and many."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.training import (
    MakeOptimizer,
    adamw_foreach,
    adamw_one_by_one,
    assert_equal_training,
    assert_same_bits,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    sgd_foreach,
    sgd_one_by_one,
)

OPTIMIZERS = {each.__name__: each for each in (sgd_one_by_one, sgd_foreach, adamw_one_by_one, adamw_foreach)}


def shard(model: nn.Module, many_groups: bool) -> None:
    if many_groups:
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())


def check_training(make: Callable[[], nn.Module], inputs: list[Tensor], optimizer: MakeOptimizer, many_groups: bool) -> None:
    """Each rank's rows bit for bit; whole batches in fp64: the rounding of fp32 sums depends on the processor, steps carry it on."""
    model = make()
    shard(model, many_groups)
    assert_same_bits(fed_own_chunk(model, inputs, optimizer), fed_in_chunks(make(), inputs, optimizer))
    model, inputs = make().double(), [x.double() if x.is_floating_point() else x for x in inputs]
    shard(model, many_groups)
    steps = fed_own_chunk(model, inputs, optimizer)
    assert_equal_training(steps, fed_whole(make().double(), inputs, optimizer), bound=1e-12, ulps=256)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("many_groups", [False, True], ids=["one_group", "many_groups"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_an_mlp_equals_the_unsharded_model(optimizer, many_groups):
    check_training(mlp, batches(4), OPTIMIZERS[optimizer], many_groups)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("many_groups", [False, True], ids=["one_group", "many_groups"])
def test_training_a_transformer_equals_the_unsharded_model(many_groups):
    check_training(transformer, token_batches(4), sgd_foreach, many_groups)


@on_ranks(2, 3)
def test_adam_turns_the_rounding_of_a_zero_gradient_into_steps_and_of_no_other(world_size):
    """The key bias of attention has a gradient of zero in exact arithmetic; Adam divides it by its own size."""
    model, in_64_bits = transformer(), transformer().double()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    shard(model, many_groups=True)
    oracle = fed_whole(in_64_bits, token_batches(4), adamw_foreach)
    for name, grad in oracle[0].grads.items():
        is_zero = grad.abs().max() < 1e-12
        assert is_zero == name.endswith("key.bias"), name

    steps = fed_own_chunk(model, token_batches(4), adamw_foreach)
    assert_same_bits(steps, fed_in_chunks(reference, token_batches(4), adamw_foreach))  # its rounding is reproduced, too
    whole_steps = fed_whole(whole, token_batches(4), adamw_foreach)
    assert_equal_training(steps, whole_steps, bound=1e-5, ulps=64, but=["key.bias"])
    for name, value in model.named_parameters():
        if name.endswith("key.bias"):  # far past the bound, in the unsharded model as well
            for other in (value.full_tensor().cpu(), whole_steps[-1].params[name]):
                assert (other - oracle[-1].params[name]).abs().max() > 1e-5
