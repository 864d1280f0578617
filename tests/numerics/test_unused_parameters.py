"""Parameters without a gradient: frozen, unused on all ranks, unused on some, toggled between steps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import Block, batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    adamw,
    assert_equal_grads,
    assert_equal_training,
    assert_same_bits,
    assert_same_tensors,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    grads_of,
    own_chunk,
    sgd,
)


class Routed(nn.Module):
    """Sends ``x`` through the blocks that ``route`` names; block 3 and ``spare`` are never used by default."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(4))
        self.spare = nn.Linear(7, 2)
        self.route = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.route:
            x = self.blocks[index](x)
        return x


@on_ranks(1, 2, 3, timeout=30)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_parameters_unused_on_every_rank_keep_no_gradient(optimizer):
    """With None instead of zeros, weight decay and momentum leave them alone, like in the unsharded model."""
    model, reference = with_reference(Routed(), shard_blocks)
    steps = fed_own_chunk(model, batches(), optimizer)
    assert steps[-1].grads["spare.weight"] is None
    assert steps[-1].grads["blocks.3.up.weight"] is None
    assert_same_bits(steps, fed_in_chunks(reference, batches(), optimizer))


class Choosing(nn.Module):
    """Runs those of its equal-shaped layers that it is told; with none of them it returns its input as it is."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(num_layers))

    def forward(self, x: Tensor, uses: list[int]) -> Tensor:
        for index in uses:
            x = x + torch.tanh(self.layers[index](x))
        return x


class ChoosingBlocks(nn.Module):
    """Equal-shaped blocks, so that gradients of one fit into another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Choosing(2) for _ in range(3))

    def forward(self, x: Tensor, uses: list[list[int]]) -> Tensor:
        x = self.first(x)
        for block, indices in zip(self.blocks, uses, strict=True):
            x = block(x, indices)
        return x


# What rank r runs of each of the three blocks.
USES = {
    "rank 0 leaves out a layer": lambda rank: [[0, 1], [1] if rank == 0 else [0, 1], [0, 1]],
    "the last rank leaves out another": lambda rank: [[0, 1], [0, 1], [0] if rank == dist.get_world_size() - 1 else [0, 1]],
    "each rank another layer": lambda rank: [[rank % 2], [1 - rank % 2], [rank % 2]],
    "rank 0 skips a whole block": lambda rank: [[0, 1], [] if rank == 0 else [0, 1], [0, 1]],
    "each rank skips another block": lambda rank: [[] if block == rank else [0] for block in range(3)],
    "rank 0 skips them all": lambda rank: [[], [], []] if rank == 0 else [[0], [1], [0]],
}


@on_ranks(2, 3, timeout=30)
@pytest.mark.parametrize(("after", "needs_input_grad"), [(True, False), (False, True), ("one group", True)])
@pytest.mark.parametrize("uses", USES)
def test_a_parameter_unused_on_some_ranks_gets_its_gradient_on_all(uses, after, needs_input_grad):
    """Reducing what happens to arrive would let two groups of equal shapes swap their gradients without an error."""
    model, reference = with_reference(ChoosingBlocks())
    if after == "one group":
        fully_shard(model, mesh=cpu_mesh())
    else:
        shard_blocks(model, after)
    for x in batches(2):
        mine = own_chunk(x).clone().requires_grad_(needs_input_grad)
        model(mine, USES[uses](dist.get_rank())).square().mean().backward()
        for rank, chunk in enumerate(x.chunk(dist.get_world_size())):
            reference(chunk, USES[uses](rank)).square().mean().div(dist.get_world_size()).backward()
        assert_equal_grads(grads_of(model), grads_of(reference))


@on_ranks(2, 3, timeout=30)
@pytest.mark.parametrize("after", [True, False])
def test_a_model_that_returns_its_input_reduces_once(after):
    """The node of its input is the node of its output: backward begins and ends in it, in this order."""
    model, reference = with_reference(Choosing(2), fully_shard, mesh=cpu_mesh(), reshard_after_forward=after)
    for x in batches():
        model(own_chunk(x).requires_grad_(), [] if dist.get_rank() == 0 else [1]).square().mean().backward()
        for rank, chunk in enumerate(x.chunk(dist.get_world_size())):
            loss = reference(chunk.requires_grad_(), [] if rank == 0 else [1]).square().mean() / dist.get_world_size()
            loss.backward()
        assert_equal_grads(grads_of(model), grads_of(reference))


@on_ranks(2, 3, timeout=30)
def test_unused_parameters_get_zeros_where_that_was_asked_for():
    model = Routed()
    shard_blocks(model)
    model.set_reduce_scatter_unused_params(True)
    steps = fed_own_chunk(model, batches(1))
    assert torch.count_nonzero(steps[0].grads["spare.weight"].to_local()) == 0
    assert steps[0].grads["spare.weight"].shape == (2, 7)


# --- frozen -----------------------------------------------------------------------------------------------------------------------


def freeze(model: nn.Module, *ends: str) -> None:
    for name, param in model.named_parameters():
        if name.endswith(ends):
            param.requires_grad_(False)


FROZEN = {
    "biases": ("bias",),
    "one whole block": tuple(f"blocks.1.{name}" for name, _ in Block(1).named_parameters()),
    "all but the last layer": ("weight", "bias", "scale"),
}


@on_ranks(1, 2, 3, timeout=30)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters_share_a_group_with_trainable_ones(frozen, after):
    model = mlp()
    freeze(model, *FROZEN[frozen])
    model.last.requires_grad_(True)
    reference = copy.deepcopy(model)
    shard_blocks(model, after)
    assert_trains_bitwise_as(model, reference, batches(), adamw)


@on_ranks(1, 2, 3, timeout=30)
@pytest.mark.parametrize("gather_all", [True, False])
def test_requires_grad_may_be_toggled_between_steps(gather_all):
    model, reference = with_reference(mlp())
    if gather_all:
        fully_shard(model, mesh=cpu_mesh())
    else:
        shard_blocks(model)
    stages = [("first.weight",), ("weight",), (), ("bias", "scale"), ("blocks.0.up.weight",)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for stage, x in zip(stages, batches(len(stages)), strict=True):
        for each in (model, reference):
            each.requires_grad_(True)
            if stage:
                freeze(each, *stage)
        ours = fed_own_chunk(model, [x], optimizer=optimizer)
        theirs = fed_in_chunks(reference, [x], lambda params: reference_optimizer)
        assert_same_bits(ours, theirs)


@on_ranks(2, 3, timeout=30)
def test_nothing_to_train_is_no_error():
    model, whole = with_reference(mlp())
    shard_blocks(model.requires_grad_(False))
    x = own_chunk(batches()[0]).requires_grad_()
    model(x).square().mean().backward()
    mine = x.grad
    x.grad = None
    whole.requires_grad_(False)(x).square().mean().backward()
    assert torch.equal(mine, x.grad)
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2, 3, timeout=30)
def test_ignored_parameters_are_left_alone():
    model, reference = with_reference(mlp())
    ignored = {model.blocks[0].scale, model.last.bias}
    fully_shard(model.blocks[0], mesh=cpu_mesh(), ignored_params=ignored)
    fully_shard(model, mesh=cpu_mesh(), ignored_params=ignored)
    assert {model.blocks[0].scale, model.last.bias} == ignored

    def averaged_by_hand(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for param in model.parameters():
            if param in ignored:
                parts = [torch.empty_like(param) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, param.grad)
                param.grad = sum(parts) / dist.get_world_size()
        return loss

    steps = fed_own_chunk(model, batches(), iteration=averaged_by_hand)
    assert_equal_training(steps, fed_in_chunks(reference, batches()))


@on_ranks(1, 2, 3, timeout=30)
def test_a_backward_that_reaches_only_a_part_of_the_model():
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        seen = []
        handle = model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output))
        model(x)
        handle.remove()
        loss = seen[0].square().mean()
        loss.backward()
        return loss

    steps = fed_own_chunk(model, batches(), iteration=iteration)
    reference_steps = fed_in_chunks(reference, batches(), iteration=iteration)
    assert_same_bits(steps, reference_steps)
    assert_same_tensors({"grad": steps[0].grads["last.weight"]}, {"grad": None}, "the unreached part's")
