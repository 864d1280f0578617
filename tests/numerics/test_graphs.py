"""Unusual graphs: two models in one backward, gradients of gradients, autocast, auxiliary losses, forwards without grad inside."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import on_ranks
from harness.models import Block, batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_equal_grads,
    assert_equal_training,
    assert_same_bits,
    assert_trains_as,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    grads_of,
    own_chunk,
)


def rows_of_all_ranks(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(dist.get_world_size())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_two_models_in_one_backward(after):
    """A generator and a critic: the critic's backward runs into the generator's, both are roots."""
    generator, critic = mlp(seed=0), nn.Sequential(Block(5), Block(5))
    wholes = copy.deepcopy((generator, critic))
    shard_blocks(generator, after)
    shard_blocks(critic, after)
    for x in batches(2):
        # The critic's step, on the detached output; then the generator's, through the critic.
        for through in (False, True):
            made = generator(own_chunk(x))
            critic(made if through else made.detach()).square().mean().backward()
            for rows in rows_of_all_ranks(x):
                made = wholes[0](rows)
                loss = wholes[1](made if through else made.detach()).square().mean()
                (loss / dist.get_world_size()).backward()
        assert_equal_grads(grads_of(generator), grads_of(wholes[0]))
        assert_equal_grads(grads_of(critic), grads_of(wholes[1]))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_a_penalty_on_the_gradient_of_the_input(after):
    model, reference = with_reference(mlp(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), [x], create_graph=True)
        loss = output.square().mean() + slope.square().mean()
        loss.backward()
        return loss

    assert_trains_as(model, reference, batches(), iteration=iteration)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_autocast_around_forward(after):
    model, reference = with_reference(mlp(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


class WithAuxiliaryLoss(nn.Module):
    """Each block's output also goes into a loss of its own; the last block's is not used otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.head(x), outputs


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("separately", [True, False])
def test_auxiliary_losses(separately, after):
    model, reference = with_reference(WithAuxiliaryLoss(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        output, outputs = model(x)
        losses = [output.square().mean(), *(each.abs().mean() for each in outputs)]
        if separately:
            for loss in losses[:-1]:
                loss.backward(retain_graph=True)
            losses[-1].backward()
        else:
            sum(losses).backward()
        return sum(losses)

    steps = fed_own_chunk(model, batches(), iteration=iteration)
    # Where a block's input has other uses, too, a node in between changes the order in which autograd adds their gradients.
    assert_equal_training(steps, fed_in_chunks(reference, batches(), iteration=iteration), ulps=64)


class Bootstrapped(nn.Module):
    """Runs its blocks without grad for a target, then with grad; the first one runs without grad only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
            target = self.blocks[2](self.blocks[1](x))
        return self.blocks[2](self.blocks[1](x * 0.5)) - target


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_forwards_without_grad_inside_of_a_forward_with(after):
    model, reference = with_reference(Bootstrapped(), shard_blocks, after)
    steps = fed_own_chunk(model, batches())
    assert steps[0].grads["blocks.0.scale"] is None
    assert_same_bits(steps, fed_in_chunks(reference, batches()))


@on_ranks(1, 2, 3)
def test_a_teacher_that_is_the_model_itself_without_grad():
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        student = model(x)
        with torch.no_grad():
            teacher = model(x + 0.1)
        loss = (student - teacher).square().mean() + student.square().mean()
        loss.backward()
        return loss

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


class Cut(nn.Module):
    """Detaches between its blocks: each learns from its own loss, the graph is in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for block in self.blocks:
            x = block(x.detach())
            outputs.append(x)
        return outputs


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_graph_in_pieces(after, at_once):
    model, reference = with_reference(Cut(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        losses = [output.square().mean() for output in model(x)]
        if at_once:
            torch.autograd.backward(losses)
        else:
            for loss in losses:
                loss.backward()
        return sum(losses)

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


@on_ranks(2, 3)
def test_a_backward_with_a_gradient_of_its_own_for_a_part_of_the_outputs():
    model, reference = with_reference(WithAuxiliaryLoss(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        output, outputs = model(x)
        torch.autograd.backward([output, outputs[1]], [output.detach() / 10, torch.ones_like(outputs[1])])
        return output.detach().mean()

    assert_trains_as(model, reference, batches(), iteration=iteration, ulps=64)
