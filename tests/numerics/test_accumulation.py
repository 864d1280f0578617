"""Gradients accumulated over micro-batches, with and without communication, on one mesh axis and on two."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPModule
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_equal_training,
    assert_same_bits,
    assert_trains_as,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    forced,
    forward_backward,
    micro_batches,
)


def in_micro_batches(model: nn.Module, x: Tensor) -> Tensor:
    """Three backwards into the same gradients; a sharded model communicates at each of them."""
    return torch.stack([forward_backward(model, micro_batch) for micro_batch in x.chunk(3)]).mean()


def synced_at_the_last(model: nn.Module, x: Tensor) -> Tensor:
    losses = []
    for index, micro_batch in enumerate(x.chunk(3)):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == 2)
        losses.append(forward_backward(model, micro_batch))
        if isinstance(model, FSDPModule) and index < 2:
            assert all(param.grad is None for param in model.parameters())
    return torch.stack(losses).mean()


@on_ranks(1, 2, 3, 4)
def test_gradients_reduced_at_every_micro_batch_add_up():
    model, reference = with_reference(mlp(), shard_blocks)
    assert_trains_as(model, reference, batches(shape=(36, 7)), iteration=in_micro_batches)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("after", [True, False, None])
def test_gradients_accumulated_without_communication_are_reduced_at_the_last_micro_batch(after):
    model = mlp()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    shard_blocks(model, after)
    inputs = batches(shape=(36, 7))
    steps = fed_own_chunk(model, inputs, iteration=synced_at_the_last)
    assert_same_bits(steps, fed_in_chunks(reference, inputs, iteration=synced_at_the_last))
    assert_equal_training(steps, fed_whole(whole, inputs, iteration=synced_at_the_last))


@on_ranks(2, 3)
def test_one_group_may_accumulate_while_the_others_communicate():
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        losses = []
        for index, micro_batch in enumerate(x.chunk(3)):
            if isinstance(model, FSDPModule):
                model.blocks[1].set_requires_gradient_sync(index == 2)
                model.set_requires_gradient_sync(index >= 1, recurse=False)
            losses.append(forward_backward(model, micro_batch))
            if isinstance(model, FSDPModule):
                assert (model.blocks[0].up.weight.grad is None) is False
                assert (model.blocks[1].up.weight.grad is None) == (index < 2)
                assert (model.first.weight.grad is None) == (index < 1)
        return torch.stack(losses).mean()

    inputs = batches(shape=(36, 7))
    assert_trains_as(model, reference, inputs, iteration=iteration)


@on_ranks(2, 3)
def test_a_gradient_from_an_earlier_step_is_added_to():
    """zero_grad every other step: sharded gradients are there when the backward begins."""
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        first = forward_backward(model, x)
        kept = {name: param.grad for name, param in model.named_parameters()}
        second = forward_backward(model, x + 1)
        assert all(param.grad is kept[name] for name, param in model.named_parameters())
        return first + second

    assert_trains_as(model, reference, batches(), iteration=iteration)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_ends_an_accumulation(set_to_none):
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        forward_backward(model, x + 1)
        model.zero_grad(set_to_none=set_to_none)
        return forward_backward(model, x)

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


@on_ranks(1, 2, 3)
def test_micro_batches_before_the_last_backward_wait_for_nothing_and_lose_nothing():
    """set_is_last_backward(False): reductions may still be under way when a backward returns."""
    model, reference = with_reference(mlp(), shard_blocks)

    assert_trains_as(model, reference, batches(shape=(36, 7)), iteration=micro_batches(3, set_is_last_backward=[2]))


# --- two mesh axes --------------------------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("gather", ["direct", "packed", "mixed"])
@pytest.mark.parametrize("after", [True, False])
def test_replicas_of_shards_average_over_all_ranks(gather, after):
    model = mlp()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    with forced(gather=gather):
        shard_blocks(model, after, mesh=cpu_mesh(2, 2))
    steps = fed_own_chunk(model, batches())
    assert_equal_training(steps, fed_in_chunks(reference, batches()))
    assert_equal_training(steps, fed_whole(whole, batches()))


@on_ranks(4)
def test_replicas_hold_the_same_bits():
    model = shard_blocks(mlp(), mesh=cpu_mesh(2, 2))
    fed_own_chunk(model, batches())
    for param in model.parameters():
        local = param.to_local()
        both = [torch.empty_like(local) for _ in range(2)]
        torch.distributed.all_gather(both, local.contiguous(), group=cpu_mesh(2, 2).get_group(0))
        assert torch.equal(*both)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_gradients_are_reduce_scattered_at_each_and_all_reduced_at_the_last_micro_batch(shape):
    model, reference = with_reference(mlp(), shard_blocks, mesh=cpu_mesh(*shape))
    assert_trains_as(model, reference, batches(shape=(36, 7)), iteration=micro_batches(3, set_requires_all_reduce=[2]))


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_replicas_accumulate_without_communication(shape):
    model, reference = with_reference(mlp(), shard_blocks, mesh=cpu_mesh(*shape))
    inputs = batches(shape=(36, 7))
    assert_trains_as(model, reference, inputs, iteration=synced_at_the_last)


@on_ranks(4)
def test_accumulation_may_pass_through_all_three_stages():
    """Micro-batch 0 stays on the rank, 1 is reduce-scattered, 2 is all-reduced."""
    model, reference = with_reference(mlp(), shard_blocks, mesh=cpu_mesh(2, 2))
    iteration = micro_batches(3, set_requires_gradient_sync=[1, 2], set_requires_all_reduce=[2])
    assert_trains_as(model, reference, batches(shape=(36, 7)), iteration=iteration)
