"""Ranks whose backwards reach different units: every rank raises, by the name of the unit, before a gradient is communicated.

What a rank does without communication is its own, and right.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2 import OrderError, fully_shard, parallelize
from fsdp2.core.iteration.late_comparison import peers_on
from fsdp2.core.iteration.module_state import named_units
from fsdp2.policy import ReduceScatter
from fsdp2.torch_names import torch_collectives
from harness import cpu_mesh, on_ranks
from harness.models import batches
from harness.sharding import with_reference
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


def roots(num_blocks: int = 4) -> tuple[nn.Module, Model]:
    """Each layer is a root of its own, below a module that nobody sharded."""
    torch.manual_seed(0)
    model, reference = with_reference(Model(num_blocks))
    for layer in (model.first, *model.blocks):
        fully_shard(layer, mesh=cpu_mesh())
    return model, reference


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_a_root_that_one_rank_leaves_out_is_an_error_by_name_on_every_rank(frozen):
    """Symptom: roots did not know of each other; the gradients of two were swapped in silence, or gloo ended the process."""
    model, reference = roots()
    x, *_ = batches(1)
    check_step(model, reference, x)
    with pytest.raises(OrderError, match=r"(?s)1 units.*the root FSDPBlock: .*ranks \[0\] does not have it"):
        step(model, own_chunk(x), EVERY, frozen if dist.get_rank() == 0 else None)
    for layer in (model.first, *model.blocks):
        layer.reset_iter_state()
    check_step(model, reference, x)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("have_run", [True, False])
def test_a_rank_whose_backward_has_one_root_of_one_unit_compares_it_with_others_that_have_two(have_run):
    """Symptom: it compared nothing, since it had nothing to leave out, and gloo ended the process. have_run: in a backward before"""
    model, reference = roots(num_blocks=1)
    x, *_ = batches(1)
    name = "the root FSDPBlock"
    if have_run:
        step(model, own_chunk(x), [0])
    elif dist.get_rank() == 0:
        name = "a root that this rank has not run"
    with pytest.raises(OrderError, match=rf"(?s)1 units.*{name}: .*ranks \[0\] does not have it"):
        step(model, own_chunk(x), [0], 0 if dist.get_rank() == 0 else None)
    for layer in (model.first, *model.blocks):
        layer.reset_iter_state()
        layer.zero_grad()
    step(model, own_chunk(x), [0])
    step(reference, x, [0])
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


@on_ranks(2, timeout=60)
def test_roots_whose_forward_one_backward_does_not_reach_are_not_compared():
    """Rank 1 keeps the graph of a forward of other roots, whose backward never comes."""
    model, reference = roots()
    other, _ = roots()
    x, *_ = batches(1)
    kept = [other(own_chunk(x), EVERY)]
    if dist.get_rank() == 0:
        kept.clear()
    check_step(model, reference, x)


@on_ranks(2, timeout=60)
def test_backwards_of_two_models_may_follow_their_forwards_in_any_order():
    model, reference = roots()
    other, _ = roots()
    x, *_ = batches(1)
    losses = [each(own_chunk(x), EVERY).square().mean() for each in (model, other)]
    for loss in losses:
        loss.backward()
    step(reference, x, EVERY)
    for each in (model, other):
        assert_equal_grads(grads_of(each), grads_of(reference), ulps=32)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_replicated_roots_that_ranks_run_in_different_orders_are_told_or_right(order):
    """Symptom: gradients of roots that are reduced at the end of backward were swapped. Their inputs need no gradient."""
    torch.manual_seed(0)
    references = [nn.Linear(DIM, DIM) for _ in range(3)]
    models = [fully_shard(copy.deepcopy(each), mesh=cpu_mesh(2, 1)) for each in references]
    x, *_ = batches(1)

    def run(modules: list[nn.Module], order: Sequence[int], x: Tensor) -> None:
        outputs = {index: modules[index](x) * (index + 1) for index in order}
        (outputs[0] + outputs[1] + outputs[2]).square().mean().backward()

    run(models, (0, 1, 2), own_chunk(x))
    for model in models:
        model.zero_grad()
    mine = order if dist.get_rank() else (0, 1, 2)
    if order == (0, 1, 2):
        run(models, mine, own_chunk(x))
    else:
        with pytest.raises(OrderError, match="ranks ran units in different orders"):
            run(models, mine, own_chunk(x))
        assert all(param.grad is None for model in models for param in model.parameters())
        for model in models:
            model.reset_iter_state()
        run(models, (0, 1, 2), own_chunk(x))
    run(references, (0, 1, 2), x)
    for model, reference in zip(models, references, strict=True):
        assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


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
    model, reference = with_reference(Model())
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


# --- ranks that may differ -------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two blocks that get plain data, so that both are reduced at the end of backward, and a head for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Block()
        self.right = Block()
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.left(x)), self.head(self.right(x))


def check_each_rank(model: nn.Module, reference: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> None:
    """``loss_of(model, rank)`` differs between ranks: gradients are the mean of what each rank's loss gives the unsharded model."""
    model.zero_grad()
    reference.zero_grad()
    loss_of(model, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        (loss_of(reference, rank) / dist.get_world_size()).backward()
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=64)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_call_a_block_that_is_kept_different_numbers_of_times(strategy):
    """Symptom: an OrderError about the order of units. Each block is gathered before, and reduced once."""
    model, reference = models(strategy)
    model.set_reshard_after_forward(False)
    x, *_ = batches(1)
    check_each_rank(model, reference, lambda model, rank: model(x, EVERY).square().mean())
    check_each_rank(model, reference, lambda model, rank: model(x, [0, 1, 0, 2, 3] if rank else EVERY).square().mean())


@on_ranks(2, timeout=60)
def test_ranks_may_leave_out_frozen_blocks_that_nobody_gathers():
    model, reference = models("ddp")
    for each in (model, reference):
        each.blocks[1].requires_grad_(False)
    x, *_ = batches(1)
    check_each_rank(model, reference, lambda model, rank: model(x, EVERY if rank else [0, 2, 3]).square().mean())


@on_ranks(2, timeout=60)
def test_one_rank_alone_may_differentiate_a_frozen_model_that_nobody_gathers():
    """A perceptual loss, or the gradient of an input in a log. Symptom: that rank waited for the others."""
    model, reference = models("ddp")
    model.requires_grad_(False)
    if dist.get_rank() == 0:
        x = batches(1)[0].requires_grad_()
        (actual,) = torch.autograd.grad(model(x, EVERY).square().mean(), x)
        (expected,) = torch.autograd.grad(reference(x, EVERY).square().mean(), x)
        assert_equal_grads({"x": actual}, {"x": expected}, ulps=32)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_data_of_one_rank_alone_may_need_a_gradient(strategy):
    """The root and the first block are reduced last, at the end of backward or just before it."""
    model, reference = models(strategy)
    x, *_ = batches(1)
    check_each_rank(model, reference, lambda model, rank: model(x.clone().requires_grad_(rank == 0), EVERY).square().mean())


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_may_keep_the_graph_of_an_evaluation(strategy):
    model, reference = models(strategy)
    x, *_ = batches(1)
    kept = []
    for _ in range(2):
        output = model(x, EVERY)
        if dist.get_rank() == 0:
            kept.append(output)
        check_each_rank(model, reference, lambda model, rank: model(x, EVERY).square().mean())


@on_ranks(2, timeout=60)
def test_one_rank_may_call_a_block_alone_between_forward_and_backward():
    model, reference = models("ddp")
    x, *_ = batches(1)
    loss = model(own_chunk(x), EVERY).square().mean()
    if dist.get_rank() == 0:
        model.blocks[1](x)
    loss.backward()
    step(reference, x, EVERY)
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_rank_whose_loss_ignores_a_block_with_plain_input_takes_part_at_the_end(strategy, holds):
    """Symptom: with blocks of equal sizes the gradients of one in the other, with others a hang. holds: the graph is still there."""
    reference = Towers()
    model = parallelize(copy.deepcopy(reference), strategy, wrap={Block})
    x, *_ = batches(1)
    kept = []

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        left, right = model(x)
        if holds:
            kept.append((left, right))
        return left.square().mean() if rank else left.square().mean() + right.square().mean()

    for _ in range(2):
        check_each_rank(model, reference, loss_of)
        kept.clear()


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("holds", [True, False])
def test_a_loss_that_ignores_a_block_with_plain_input_is_an_error_by_name_where_backward_gathers(holds):
    reference = Towers()
    model = parallelize(copy.deepcopy(reference), "zero3", wrap={Block})
    x, *_ = batches(1)
    left, right = model(x)
    loss = left.square().mean() if dist.get_rank() else left.square().mean() + right.square().mean()
    if not holds:
        del left, right
    with pytest.raises(OrderError, match=r"right: .*ranks \[1\] does not have it"):
        loss.backward()
    model.reset_iter_state()
    check_each_rank(model, reference, lambda model, rank: torch.stack([each.square().mean() for each in model(x)]).sum())


def kept_towers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = Towers()
    model = copy.deepcopy(reference)
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=False)
    return model, reference


def sum_of_both(model: nn.Module, rank: int = 0) -> Tensor:
    return torch.stack([each.square().mean() for each in model(batches(1)[0])]).sum()


class Plain(ReduceScatter):
    """Reduces as a communicator of the user's: no flags tell which parameters other ranks used."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False):
        return torch_collectives.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("custom", [False, True])
def test_ranks_reduce_what_their_losses_ignore_unless_a_custom_communicator_reduces_it(custom):
    model, reference = kept_towers()
    if custom:
        model.right.set_custom_reduce_scatter(Plain())
    check_each_rank(model, reference, sum_of_both)
    x, *_ = batches(1)

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        left, right = model(x)
        return left.square().mean() if rank else left.square().mean() + right.square().mean()

    if not custom:
        check_each_rank(model, reference, loss_of)
        return
    with pytest.raises(OrderError, match=r"right: .*ranks \[1\] does not have it"):
        loss_of(model, dist.get_rank()).backward()
    model.reset_iter_state()
    check_each_rank(model, reference, sum_of_both)


@on_ranks(2, timeout=60)
def test_a_rank_that_leaves_out_a_root_that_others_reach_second_is_told():
    """No end of a backward through that root comes on this rank, so it can't reduce there."""
    torch.manual_seed(0)
    first, second = (fully_shard(nn.Linear(DIM, DIM), mesh=cpu_mesh(2, 1)) for _ in range(2))
    x, *_ = batches(1)
    (second(x) + first(x)).sum().backward()
    for root in (first, second):
        root.zero_grad()
    with pytest.raises(OrderError, match=r"(?s)1 units.*the root FSDPLinear: .*ranks \[1\] does not have it"):
        (first(x) if dist.get_rank() else second(x) + first(x)).sum().backward()
    assert all(param.grad is None for root in (first, second) for param in root.parameters())


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("unit", ["left", "right"])
def test_ranks_decide_alike_though_one_of_them_alone_has_resharded_a_unit(unit):
    model, reference = kept_towers()
    check_each_rank(model, reference, sum_of_both)
    loss = sum_of_both(model)
    if dist.get_rank() == 0:
        model.get_submodule(unit).reshard()
    with pytest.raises(OrderError, match=rf"(?s)1 units.*{unit}: .*ranks \[1\] reduces it last; .*ranks \[0\] reduces it last, for"):
        loss.backward()
    model.reset_iter_state()
    check_each_rank(model, reference, sum_of_both)


@on_ranks(2, timeout=60)
def test_what_one_rank_accumulated_in_a_group_is_reduced_though_no_last_micro_batch_calls_it():
    model, reference = models("ddp")
    x, y = batches(2)
    model.set_requires_gradient_sync(False)
    step(model, own_chunk(x), EVERY if dist.get_rank() == 0 else [0, 2, 3])
    model.set_requires_gradient_sync(True)
    step(model, own_chunk(y), [0, 2, 3])
    for rank, chunk in enumerate(x.chunk(2)):
        (reference(chunk, [0, 2, 3] if rank else EVERY).square().mean() / 2).backward()
    step(reference, y, [0, 2, 3])
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


class Tower(nn.Module):
    """``shift``: a group of another dtype."""

    def __init__(self, shifts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.shift = nn.Parameter(torch.ones(DIM, dtype=torch.float64)) if shifts else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if self.shift is None else x + self.shift.to(x.dtype)


class TiedTowers(nn.Module):
    """Units a and b have one weight, and 0 and 1 are of the same size; ``route``: which of them run."""

    def __init__(self, shifts: bool) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.towers = nn.ModuleDict({"a": Tower(shifts), "b": Tower(), "0": Tower(), "1": Tower()})
        self.towers["b"].linear.weight = self.towers["a"].linear.weight

    def forward(self, x: Tensor, route: str) -> Tensor:
        x = self.first(x)
        for each in route:
            x = x + self.towers[each](x)
        return x


def tied_towers(shifts: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, reference = with_reference(TiedTowers(shifts))
    for module in (*model.towers.values(), model):
        fully_shard(module, mesh=cpu_mesh(2, 1))
    return model, reference


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("routes", [("a0b1", "a0b1"), ("a01", "0b1"), ("01", "a0b1"), ("0b1", "01")])
def test_ranks_may_use_different_units_of_a_lent_group_or_none(routes):
    """It is reduced at the end. Symptom: where a rank had used none, the others' gradients of it came into a block of the same size."""
    model, reference = tied_towers(shifts=False)
    x, *_ = batches(1)
    for each in (("a0b1", "a0b1"), routes, ("a0b1", "a0b1")):
        check_each_rank(model, reference, lambda model, rank, each=each: model(x, each[rank]).square().mean())


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("mine", ["01", "0b1"])
def test_a_rank_that_leaves_out_a_unit_that_lends_one_of_its_groups_is_told(mine):
    model, reference = tied_towers(shifts=True)
    x, *_ = batches(1)
    check_each_rank(model, reference, lambda model, rank: model(x, "a0b1").square().mean())
    with pytest.raises(OrderError, match=r"towers\.a: .*ranks \[0\] does not have it"):
        model(x, "a0b1" if dist.get_rank() else mine).square().mean().backward()
    model.reset_iter_state()
    check_each_rank(model, reference, lambda model, rank: model(x, "a0b1").square().mean())


@on_ranks(2, timeout=60)
def test_ranks_may_call_a_lender_different_numbers_of_times_where_the_root_keeps_what_it_borrows():
    reference = Model(2)
    reference.first.weight = reference.blocks[0].linear.weight
    model = parallelize(copy.deepcopy(reference), "zero3", wrap={Block})
    x, *_ = batches(1)
    check_each_rank(model, reference, lambda model, rank: model(x, [0, 1]).square().mean())
    check_each_rank(model, reference, lambda model, rank: model(x, [0, 1, 0] if rank else [0, 1]).square().mean())


@on_ranks(2, timeout=60)
def test_units_over_the_same_ranks_through_other_process_groups_are_compared_too():
    model, reference = with_reference(Model())
    other = DeviceMesh.from_group(dist.new_group(), cpu_mesh().device_type, mesh_dim_names=("shard",))
    for block in model.blocks[1:3]:
        fully_shard(block, mesh=other, reshard_after_forward=False)
    for module in (model.blocks[0], model.blocks[3], model):
        fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=False)
    x, *_ = batches(1)
    check_step(model, reference, x)
    with pytest.raises(OrderError, match=r"blocks\.1: .*ranks \[0\] does not have it"):
        step(model, own_chunk(x), [0, 2, 3] if dist.get_rank() == 0 else EVERY)
    model.reset_iter_state()
    check_step(model, reference, x)


class Twice(nn.Module):
    """Calls its first block again, after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.blocks[1](self.blocks[0](self.first(x)))
        return early, self.blocks[0](self.blocks[2](early))


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_that_use_different_calls_of_a_block_are_an_error_by_name(strategy):
    reference = Twice()
    model = parallelize(copy.deepcopy(reference), strategy, wrap={Block})
    x, *_ = batches(1)
    early, late = model(x)
    loss = early.square().mean() if dist.get_rank() else early.square().mean() + late.square().mean()
    with pytest.raises(OrderError, match=r"blocks\.2: .*ranks \[1\] does not have it"):
        loss.backward()
    model.reset_iter_state()
    check_each_rank(model, reference, lambda model, rank: torch.stack([each.square().mean() for each in model(x)]).sum())


class Two(nn.Module):
    """Two parameters of one size, whose gradients would pass for each other; the rest is a unit of its own, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.rest = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (2 * self.a + 30 * self.b).sum() + self.rest(x).sum()


@on_ranks(2)
@pytest.mark.parametrize("num_units", [1, 2])
def test_ranks_that_freeze_different_parameters_after_some_steps_raise(num_units):
    """Symptom: with one unit, gradients were means of two parameters'. Cause: one unit was compared in its first backward alone."""
    model = Two()
    if num_units == 2:
        fully_shard(model.rest, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    x = torch.ones(3, 2)
    for _ in range(2):
        model(x).backward()
        model.zero_grad()
    (model.a if dist.get_rank() == 0 else model.b).requires_grad_(False)
    with pytest.raises(OrderError, match=r"(?s)a: frozen on ranks \[0\].*b: frozen on ranks \[1\]"):
        model(x).backward()


def test_a_process_group_whose_name_comes_again_has_numbers_of_its_own() -> None:
    """Symptom: OrderError after a restart in which one process had stayed. Cause: its numbers of roots went on, by the group's name."""
    found = []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            model = fully_shard(nn.Linear(2, 2), mesh=cpu_mesh())
            [(_, unit)] = named_units(model)
            found.append((unit.groups[0].mesh.shard_group.group_name, peers_on(unit.groups[0].mesh)))
        finally:
            dist.destroy_process_group()
    assert found[0][0] == found[1][0]
    assert found[0][1] is not found[1][1]
