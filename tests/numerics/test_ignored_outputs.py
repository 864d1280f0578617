"""``set_reduce_scatter_unused_params(True)``: the loss of some ranks ignores outputs of whole units that the loss of others uses.

A rank's backward then leaves out units. It has to gather and reduce with the others all the same, in their order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, OrderError, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import Block, batches
from harness.sharding import with_reference
from harness.training import own_chunk

DIM = 7


class Branches(nn.Module):
    """A trunk of nested units and branches off it, all of equal shapes; returns what each of them gave."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block(DIM) for _ in range(2))
        self.deep = nn.ModuleList(nn.Sequential(Block(DIM), Block(DIM)) for _ in range(2))
        self.heads = nn.ModuleList(Block(DIM) for _ in range(3))
        self.use_checkpoint = False

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for trunk, deep, head in zip(self.trunk, self.deep, self.heads, strict=False):
            x = trunk(x)
            outputs.append(checkpoint(deep, x, use_reentrant=False) if self.use_checkpoint else deep(x))
            outputs.append(head(x))
        outputs += [self.heads[2](x), self.heads[2](x + 1)]
        return [*outputs, x]


def shard(model: Branches, after: bool | None, **options: object) -> FSDPModule:
    for deep in model.deep:
        fully_shard(deep[0], mesh=cpu_mesh(), reshard_after_forward=after, **options)
        fully_shard(deep, mesh=cpu_mesh(), reshard_after_forward=after, **options)
    for block in [*model.trunk, *model.heads]:
        fully_shard(block, mesh=cpu_mesh(), reshard_after_forward=after, **options)
    root = fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after, **options)
    root.set_reduce_scatter_unused_params(True)
    return root


# Which outputs the loss of each rank uses: deep 0, head 0, deep 1, head 1, head 2, head 2 again, trunk.
WEIGHTS = {
    "all": lambda rank: [1, 1, 1, 1, 1, 1, 1],
    "rank 0 ignores the last branch": lambda rank: [1, 1, 1, 0 if rank == 0 else 1, 1, 1, 1],
    "rank 0 ignores nested units": lambda rank: [0 if rank == 0 else 1, 1, 0 if rank == 0 else 1, 1, 1, 1, 1],
    "one of two calls": lambda rank: [1, 1, 1, 1, rank == 0, rank != 0, 1],
    "both calls on one rank": lambda rank: [1, 1, 1, 1, rank == 0, rank == 0, 1],
    "each rank another": lambda rank: [rank % 2, 1 - rank % 2, 1 - rank % 2, rank % 2, 1 - rank % 2, 0, rank % 2],
    "rank 0 uses the first alone": lambda rank: [1, *[0 if rank == 0 else 1] * 6],
    "nobody uses the heads": lambda rank: [1, 0, rank % 2, 0, 0, 0, 1],
}


def loss_of(outputs: list[Tensor], weights: list[int]) -> Tensor:
    return sum((output.square().mean() * weight for output, weight in zip(outputs, weights, strict=True) if weight), torch.zeros(()))


def both_halves(uses: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
    return lambda rank: [*uses(rank)[:6], 2]


def reference_grads(model: Branches, x: Tensor, weights: Callable[[int], list[int]]) -> dict[str, Tensor]:
    model.zero_grad()
    chunks = x.chunk(dist.get_world_size())
    for rank, chunk in enumerate(chunks):
        (loss_of(model(chunk), weights(rank)) / len(chunks)).backward()
    return {name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in model.named_parameters()}


def check(model: nn.Module, reference: Branches, x: Tensor, weights: Callable[[int], list[int]]) -> None:
    expected = reference_grads(reference, x, weights)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def models(after: bool | None, **options: object) -> tuple[FSDPModule, Branches]:
    torch.manual_seed(0)
    reference = Branches()
    return shard(copy.deepcopy(reference), after, **options), reference


@on_ranks(2, 3, timeout=60)
@pytest.mark.parametrize(
    ("after", "needs_input_grad"),
    [(True, False), (False, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, True), (None, False)))],
)
def test_units_that_the_loss_of_some_ranks_ignores(after, needs_input_grad):
    model, reference = models(after)
    for uses in WEIGHTS.values():
        for x in batches(1):
            model.zero_grad()
            mine = own_chunk(x).clone().requires_grad_(needs_input_grad)
            loss_of(model(mine), uses(dist.get_rank())).backward()
            check(model, reference, x, uses)


@on_ranks(2, timeout=30)
@pytest.mark.parametrize(
    "setting",
    [
        "accumulate",
        *(
            pytest.param(setting, marks=pytest.mark.slow)
            for setting in ("checkpoint", "two forwards", "backward twice", "prefetch", "half of it at a time")
        ),
    ],
)
def test_ignored_outputs_in_other_kinds_of_steps(setting):
    model, reference = models(True)
    for uses in WEIGHTS.values():
        weights = uses(dist.get_rank())
        x = batches(1)[0]
        model.zero_grad()
        mine = own_chunk(x).clone().requires_grad_()
        if setting == "accumulate":
            model.set_requires_gradient_sync(False)
            (loss_of(model(mine), weights) / 2).backward()
            model.set_requires_gradient_sync(True)
            (loss_of(model(mine), weights) / 2).backward()
        elif setting == "checkpoint":
            model.use_checkpoint = True
            loss_of(model(mine), weights).backward()
        elif setting == "two forwards":
            (loss_of(model(mine), weights) / 4 + loss_of(model(mine), weights) * 3 / 4).backward()
        elif setting == "backward twice":
            loss = loss_of(model(mine), weights) / 2
            loss.backward(retain_graph=True)
            loss.backward()
        elif setting == "prefetch":
            model.set_modules_to_backward_prefetch([model.heads[2], model.heads[1]])
            model.heads[1].set_modules_to_backward_prefetch([model.deep[1], model.trunk[1]])
            loss_of(model(mine), weights).backward()
        else:
            outputs = model(mine)
            loss_of(outputs, [*weights[:3], 0, 0, 0, 1]).backward(retain_graph=True)
            loss_of(outputs, [0, 0, 0, *weights[3:6], 1]).backward()
            uses = both_halves(uses)
        check(model, reference, x, uses)


class Checkpointed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_of_several_units_that_only_some_ranks_recompute_is_an_error_by_name(nested):
    """A recomputation gathers them in the order of forward; a rank that leaves it out knows of their backward alone.

    Symptom, where each unit has another checkpoint of its own inside: a hang, or gloo ended the process. Cause: only the innermost
    checkpoint was looked at, which has one unit.
    """
    model = Branches()
    kind = Checkpointed if nested else Block
    model.deep = nn.ModuleList(nn.Sequential(*(kind(DIM) for _ in range(3))) for _ in range(2))
    for block in (each for each in model.deep.modules() if isinstance(each, Block)):
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh()).set_reduce_scatter_unused_params(True)
    model.use_checkpoint = True
    x, *_ = batches(1)
    losses = [output.square().mean() for output in model(own_chunk(x))]
    with pytest.raises(OrderError, match="recompute different checkpointed segments"):
        sum(losses[1:] if dist.get_rank() == 0 else losses).backward()
    model.reset_iter_state()
    sum(output.square().mean() for output in model(own_chunk(x))).backward()


@on_ranks(4, timeout=60)
def test_ignored_outputs_on_replicas_of_shards():
    model, reference = with_reference(Branches())
    mesh = cpu_mesh(2, 2)
    for module in [*model.trunk, *model.deep, *model.heads, model]:
        fully_shard(module, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    for uses in WEIGHTS.values():
        x = batches(1)[0]
        model.zero_grad()
        loss_of(model(own_chunk(x)), uses(dist.get_rank())).backward()
        check(model, reference, x, uses)


@on_ranks(2, timeout=30)
def test_the_log_dies_with_the_graph_and_is_kept_only_where_it_is_asked_for():
    model, _ = models(True)
    schedule = model._get_fsdp_state().schedule
    outputs = model(own_chunk(batches(1)[0]))
    schedule = model._get_fsdp_state().schedule
    assert len(schedule.alive_logs()) == 1
    del outputs
    assert schedule.alive_logs() == []
    model.set_reduce_scatter_unused_params(False)
    loss_of(model(own_chunk(batches(1)[0])), [1] * 7).backward()
    assert schedule.alive_logs() == []


class Apart(nn.Module):
    """What it returns comes from one operation on parameters and data, or from units; one alone has an input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.first = nn.Linear(DIM, DIM)
        self.second = Block(DIM)

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.first(x)
        return [self.table(torch.arange(len(x)) % 5), self.norm(x), self.norm(x)[:, 1:], hidden, self.second(hidden)]


APART = {
    "all": lambda rank: [1, 1, 1, 1, 1],
    "rank 0 ignores the last unit": lambda rank: [1, 1, 0, 1, rank],
    "rank 0 uses the first unit alone": lambda rank: [rank, rank, rank, 1, rank],
    "rank 0 uses what comes from one operation": lambda rank: [1, rank, rank, rank, rank],
    "rank 0 uses a view": lambda rank: [rank, rank, 1, rank, rank],
}


def shard_apart(model: Apart) -> FSDPModule:
    for module in (model.first, model.second):
        fully_shard(module, mesh=cpu_mesh())
    root = fully_shard(model, mesh=cpu_mesh())
    root.set_reduce_scatter_unused_params(True)
    return root


@on_ranks(2, timeout=30)
def test_forwards_that_share_one_backward_whatever_a_rank_uses_of_them():
    reference = Apart()
    model = shard_apart(copy.deepcopy(reference))
    for uses in APART.values():
        x = batches(1)[0]
        weights = uses(dist.get_rank())
        model.zero_grad()
        (loss_of(model(own_chunk(x)), weights) / 4 + loss_of(model(own_chunk(x)), weights) * 3 / 4).backward()
        check(model, reference, x, uses)


@on_ranks(2, timeout=30)
def test_what_is_known_of_a_forward_dies_with_its_graph():
    model = shard_apart(Apart())
    schedule = None
    for index in range(5):
        output = model(own_chunk(batches(1)[0]))[index]
        schedule = model._get_fsdp_state().schedule
        output.sum()
        del output
        assert schedule.alive_logs() == []  # at once, without the garbage collector
