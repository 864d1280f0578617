"""``fully_shard([a, b])``: one group for several modules, whichever of them run, in which order, on which input.

A list's backward is over when that of the module which ran first is. If that module's input needs no gradient, only the end of the
whole backward tells. The list used to be reduced and freed when another of its modules was done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import Block, batches
from harness.sharding import with_reference
from harness.training import assert_trains_as, own_chunk

DIM = 7


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Lists(nn.Module):
    """``a`` and ``b`` are one unit; ``before`` and ``after`` belong to the root."""

    def __init__(self, way: str, layer: Callable[..., nn.Module] = Block) -> None:
        super().__init__()
        self.before = nn.Linear(DIM, DIM)
        size = (DIM,) if layer is Block else (DIM, DIM)
        self.a, self.b = layer(*size), layer(*size)
        if way == "a detaches":
            self.a = nn.Sequential(Detach(), self.a)
        self.after = nn.Linear(DIM, DIM)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.after(WAYS[self.way](self, x))


def _frozen(model: Lists, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = model.before(x)
    return model.b(model.a(x))


def _without_a_graph(model: Lists, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = model.a(x)
    return model.b(x)


WAYS: dict[str, Callable[[Lists, Tensor], Tensor]] = {
    "a, b": lambda model, x: model.b(model.a(x)),
    "b, a": lambda model, x: model.a(model.b(x)),
    "a twice": lambda model, x: model.b(model.a(model.a(x))),
    "a, b, a": lambda model, x: model.a(model.b(model.a(x))),
    "twice": lambda model, x: model.b(model.a(model.b(model.a(x)))),
    "a alone, twice": lambda model, x: model.a(model.a(x)),
    "branches": lambda model, x: model.a(x) + model.b(model.before(x)),
    "branches, watched first": lambda model, x: model.b(model.before(x)) + model.a(x),
    "a detaches": lambda model, x: model.b(model.before(x) + model.a(model.before(x))),
    "detached in between": lambda model, x: model.b(model.a(x).detach()) + model.a(x),
    "behind a frozen one": _frozen,
    "checkpoint of b": lambda model, x: checkpoint(model.b, model.a(x), use_reentrant=False),
    "checkpoints": lambda model, x: checkpoint(model.b, checkpoint(model.a, x, use_reentrant=False), use_reentrant=False),
    "one checkpoint": lambda model, x: checkpoint(lambda x: model.b(model.a(x)), x, use_reentrant=False),
    "reentrant checkpoints": lambda model, x: checkpoint(
        model.b, checkpoint(model.a, model.before(x), use_reentrant=True), use_reentrant=True
    ),
    "one reentrant checkpoint": lambda model, x: checkpoint(lambda x: model.b(model.a(x)), model.before(x), use_reentrant=True),
    "reentrant checkpoint of a": lambda model, x: model.b(checkpoint(model.a, model.before(x), use_reentrant=True)),
    "reentrant checkpoint of b": lambda model, x: checkpoint(model.b, model.a(model.before(x)), use_reentrant=True),
    "one in another": lambda model, x: checkpoint(
        lambda x: model.b(checkpoint(model.a, x, use_reentrant=True)), model.before(x), use_reentrant=True
    ),
    "one in another, later": lambda model, x: checkpoint(
        lambda x: model.a(x) + checkpoint(model.b, x, use_reentrant=True), model.before(x), use_reentrant=True
    ),
    "one in another that is not": lambda model, x: checkpoint(
        lambda x: model.b(checkpoint(model.a, x, use_reentrant=True)), model.before(x), use_reentrant=False
    ),
    "chunks": lambda model, x: torch.cat(
        [checkpoint(model.b, chunk, use_reentrant=True) for chunk in model.a(model.before(x)).split(1)]
    ),
    "a without a graph": _without_a_graph,
}

QUICK = (
    "a, b",
    "a, b, a",
    "branches, watched first",
    "a detaches",
    "checkpoints",
    "reentrant checkpoints",
    "reentrant checkpoint of a",
    "one in another",
)


def models(way: str, **options: object) -> tuple[Lists, Lists]:
    torch.manual_seed(0)
    model, reference = with_reference(Lists(way))
    fully_shard([model.a, model.b], mesh=cpu_mesh(), **options)
    fully_shard(model, mesh=cpu_mesh())
    return model, reference


@on_ranks(2, 3, timeout=30)
@pytest.mark.parametrize("after", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_a_list_whose_first_input_needs_no_gradient_trains_as_the_unsharded_model(way, after):
    model, reference = models(way, reshard_after_forward=after)
    assert_trains_as(model, reference, batches())


def in_hooks(model: nn.Module) -> dict[str, int]:
    """Let an SGD step run for each parameter as soon as its gradient has accumulated; returns how often each stepped, by name."""
    steps = {}

    def step(param: nn.Parameter, name: str) -> None:
        steps[name] = steps.get(name, 0) + 1
        with torch.no_grad():
            param.add_(param.grad, alpha=-0.1)
        param.grad = None

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(step, name=name))
    return steps


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_an_optimizer_in_hooks_steps_once_for_each_parameter_of_a_list(way, unused):
    """With single layers as modules, whose backward needs no parameters, the early reduction was no crash but wrong in silence."""
    model, reference = with_reference(Lists(way, nn.Linear))
    fully_shard([model.a, model.b], mesh=cpu_mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=cpu_mesh()).set_reduce_scatter_unused_params(unused)
    steps = in_hooks(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x in batches():
        model(own_chunk(x)).square().mean().backward()
        reference(x).square().mean().backward()
        used = {name for name, param in reference.named_parameters() if unused or param.grad is not None}
        assert steps == dict.fromkeys(used, 1)
        steps.clear()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), reference.get_parameter(name), msg=lambda text, n=name: f"{n}: {text}")


class Repeated(nn.Module):
    """Runs one module several times, first on plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(DIM, DIM)
        self.after = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(torch.tanh(self.block(x))))


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("unused", [False, True])
def test_an_optimizer_in_hooks_steps_once_for_a_module_that_ran_twice(unused):
    model, reference = with_reference(Repeated())
    fully_shard(model.block, mesh=cpu_mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=cpu_mesh()).set_reduce_scatter_unused_params(unused)
    steps = in_hooks(model)
    for x in batches():
        model(own_chunk(x)).square().mean().backward()
        assert steps == dict.fromkeys(dict(reference.named_parameters()), 1)
        steps.clear()
