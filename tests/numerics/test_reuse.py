"""Modules and parameters that are used more than once: ties, repeated calls, several forwards before a backward, any order."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import Block, batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    adamw,
    assert_equal_training,
    assert_same_bits,
    assert_trains_as,
    assert_trains_bitwise_as,
    backward_of,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    sgd,
)
from harness.user_warnings import warned_on_rank_0

# --- ties ---------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_head_tied_to_its_embedding_stays_tied(optimizer):
    model = transformer(tied=True)
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    shard_blocks(model)
    assert model.head.weight is model.embedding.weight
    steps = fed_own_chunk(model, token_batches(), optimizer)
    assert model.head.weight is model.embedding.weight
    assert_same_bits(steps, fed_in_chunks(reference, token_batches(), optimizer))
    if optimizer is sgd:
        assert_equal_training(steps, fed_whole(whole, token_batches(), optimizer))


class TiedAcrossBlocks(nn.Module):
    """Two blocks that share one weight; both belong to one list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("as_a_list", [True, False])
def test_a_weight_shared_by_two_layers_of_one_group(as_a_list):
    model, reference = with_reference(TiedAcrossBlocks())
    if as_a_list:
        fully_shard([model.blocks[0], model.blocks[1], model.blocks[2]], mesh=cpu_mesh())
    else:
        fully_shard(model.blocks[1], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    assert model.blocks[0].weight is model.blocks[2].weight
    assert_trains_bitwise_as(model, reference, batches())


class SharedModule(nn.Module):
    """One block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(7)
        self.middle = Block(7)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.middle(self.first(x)))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_a_module_under_two_names(after):
    model, reference = with_reference(SharedModule())
    fully_shard(model.first, mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard(model.middle, mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())


# --- several calls --------------------------------------------------------------------------------------------------------------


class Repeated(nn.Module):
    """Its blocks run one after another ``times`` times: a, b, a, b, ..."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.times = times
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("needs_input_grad", [False, True])
def test_blocks_called_several_times_before_backward(after, needs_input_grad):
    model = Repeated()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    shard_blocks(model, after)
    iteration = backward_of(lambda model, x: model(x.clone().requires_grad_(needs_input_grad)).square().mean())
    steps = fed_own_chunk(model, batches(), iteration=iteration)
    assert_same_bits(steps, fed_in_chunks(reference, batches(), iteration=iteration))
    assert_equal_training(steps, fed_whole(whole, batches(), iteration=iteration))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False, None])
@pytest.mark.parametrize("needs_input_grad", [False, True])
def test_two_forwards_before_one_backward(after, needs_input_grad):
    model, reference = with_reference(mlp(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        first, second = (half.clone().requires_grad_(needs_input_grad) for half in x.chunk(2))
        loss = (model(first).square().mean() + model(second).tanh().square().mean()) / 2
        loss.backward()
        return loss

    assert_trains_bitwise_as(model, reference, batches(), iteration=iteration)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_two_forwards_then_two_backwards(after, in_order):
    """Each backward reduces what it has; the sums over micro-batches are formed after the reduction, so bounds hold, not bits."""
    model, whole = with_reference(mlp(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        losses = [model(half).square().mean() / 2 for half in x.chunk(2)]
        for loss in losses if in_order else reversed(losses):
            loss.backward()
        return sum(losses)

    assert_trains_as(model, whole, batches(), iteration=iteration)


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [False, True])
def test_a_backward_that_is_repeated_adds_the_gradient_again_and_gathers_again_what_was_freed(after):
    model, reference = with_reference(mlp(), shard_blocks, after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    assert_trains_as(model, reference, batches(), iteration=iteration)


# --- order ----------------------------------------------------------------------------------------------------------------------


class Reordered(nn.Module):
    """Runs its blocks in ``order``, which the test changes; a block may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


ORDERS = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2], [1, 3, 0], [0, 1, 2, 3], [2, 2, 0]]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False])
def test_an_order_that_differs_between_iterations_costs_overlap_only(after):
    model, reference = with_reference(Reordered(), shard_blocks, after)

    def iterations():
        orders = iter([])

        def iteration(model: nn.Module, x: Tensor) -> Tensor:
            model.order = next(orders)
            loss = model(x).square().mean()
            loss.backward()
            return loss

        def start(orders_):
            nonlocal orders
            orders = iter(orders_)
            return iteration

        return start

    start = iterations()
    inputs = batches(len(ORDERS))
    steps = fed_own_chunk(model, inputs, iteration=start(ORDERS))
    each_rank = [order for order in ORDERS for _ in range(torch.distributed.get_world_size())]
    assert_same_bits(steps, fed_in_chunks(reference, inputs, iteration=start(each_rank)))


@on_ranks(2, 3)
def test_explicit_prefetch_lists_change_no_number():
    model, reference = with_reference(mlp(num_blocks=4), shard_blocks)
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    blocks[1].set_modules_to_forward_prefetch([blocks[3]])  # not the one that comes next
    blocks[3].set_modules_to_backward_prefetch([blocks[2], blocks[1]])
    blocks[2].set_modules_to_backward_prefetch([blocks[0]])
    assert_trains_bitwise_as(model, reference, batches(4))


@on_ranks(2, 3)
def test_prefetching_a_module_that_does_not_run_leaves_it_sharded_and_valid():
    model, reference = with_reference(Reordered())
    model.order = reference.order = [0, 1]
    shard_blocks(model)
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[3]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[2]])
    steps = fed_own_chunk(model, batches(), lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1))
    model.unshard()
    assert_same_bits(steps, fed_in_chunks(reference, batches(), lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1)))


class Gain(nn.Module):
    """A gain that is left out of ``fully_shard``, and used on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        is_used = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        return x * self.gain.to(x.device) if is_used else x


class Branched(nn.Module):
    """Three layers, the first two of them in ``way``, and a gain: backward comes to the gain's unit on rank 0 alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.target, self.between = (nn.Linear(7, 7).requires_grad_(way != "frozen") for _ in range(2))
        self.gain = Gain()
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.target(x))
        return self.head(x) + self.gain(x) + (y.detach() if self.way == "detached" else y)


@on_ranks(2, timeout=60)
def test_a_unit_without_parameters_starts_no_gather_in_a_backward_that_only_some_ranks_bring_to_it():
    """Symptom: a rank whose backward came to it gathered what it was to prefetch alone: a hang, or the next unit's parameters."""
    for way, explicit, unused in itertools.product(("trained", "frozen", "detached"), (True, False), (True, False)):
        model, reference = Branched(way), Branched(way)
        left_out = set(model.gain.parameters())
        for each in (model.target, model.between, model.head):
            fully_shard(each, mesh=cpu_mesh())
        for each in (model.gain, model):
            fully_shard(each, mesh=cpu_mesh(), ignored_params=left_out)
        if explicit:
            model.gain.set_modules_to_backward_prefetch([model.target])
        model.set_reduce_scatter_unused_params(unused)
        x = torch.linspace(-1, 1, 14).view(2, 7)
        is_ignored = "set_modules_to_backward_prefetch has no effect on gain, which has no parameters"
        with warned_on_rank_0(UserWarning, is_ignored) if explicit else contextlib.nullcontext():
            loss = model(x).square().sum()
        loss.backward()
        reference(x).square().sum().backward()
        if explicit:
            with warned_on_rank_0(UserWarning, is_ignored):
                model.gain.set_modules_to_backward_prefetch([model.target])
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            if param not in left_out and expected.grad is not None:
                assert_close(
                    param.grad.full_tensor().cpu(), expected.grad, msg=lambda text, at=(way, explicit, unused, name): f"{at}: {text}"
                )


# --- nesting --------------------------------------------------------------------------------------------------------------------


class Nest(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.before = nn.Linear(7, 7)
        self.inner = Nest(depth - 1) if depth > 0 else nn.Linear(7, 7)
        self.after = nn.Linear(7, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("after", [True, False, None])
def test_groups_nested_in_groups(after):
    model, reference = with_reference(Nest(3))
    for module in reversed([module for module in model.modules() if isinstance(module, Nest)]):
        fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=after)
    assert_trains_bitwise_as(model, reference, batches())


class OnlyChildrenHaveParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * torch.tanh(self.right(x))


@on_ranks(1, 2, 3)
def test_a_root_without_parameters_of_its_own():
    model, reference = with_reference(OnlyChildrenHaveParameters())
    fully_shard(model.left, mesh=cpu_mesh())
    fully_shard(model.right, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())


@on_ranks(1, 2, 3)
def test_a_list_of_modules_as_one_group():
    model, reference = with_reference(mlp())
    fully_shard([model.blocks[0], model.blocks[1]], mesh=cpu_mesh())
    fully_shard([model.blocks[2], model.last], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches())
