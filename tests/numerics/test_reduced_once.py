"""Every group is reduce-scattered once in each backward that reduces it, and all-reduced once a step, however it accumulates."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.core.comm import collectives
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import assert_equal_grads, grads_of, own_chunk


def count_reductions(run: Callable[[], None]) -> dict[str, int]:
    """How many collectives of gradients ``run()`` starts."""
    counts = {"reduce_scatter": 0, "all_reduce": 0}

    def counted(name: str) -> Callable[..., object]:
        function = getattr(collectives, name)

        def count(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return function(*args, **kwargs)

        return count

    patches = [mock.patch.object(collectives, name, counted(name)) for name in counts]
    for patch in patches:
        patch.start()
    try:
        run()
    finally:
        for patch in patches:
            patch.stop()
    return counts


def steps_in_hooks(model: nn.Module) -> dict[str, int]:
    """How often each parameter's post-accumulate-grad hook runs, by name; 0 at first."""
    steps = {name: 0 for name, _ in model.named_parameters()}

    def count(name: str) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            steps[name] += 1

        return hook

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(count(name))
    return steps


@on_ranks(4)
@pytest.mark.parametrize("is_last", ["every backward", "as it is"])
@pytest.mark.parametrize("in_flight", [None, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hsdp_with_the_all_reduce_in_the_last_micro_batch(unused, in_flight, is_last):
    """Partial sums that were under way to the sharded parameters looked like sums that still had to be reduced."""
    model, reference = with_reference(mlp(), shard_blocks, mesh=cpu_mesh(2, 2))
    num_groups = len(model.blocks) + 1
    model.set_reduce_scatter_unused_params(unused)
    if in_flight is not None:
        for block in [*model.blocks, model]:
            block.set_reduce_scatter_max_input_buffers(in_flight)
    steps = steps_in_hooks(model)
    micro_batches = batches(3)

    def step() -> None:
        for index, x in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last or is_last == "every backward")
            model(own_chunk(x)).square().mean().backward()

    for number in range(2):
        counts = count_reductions(step)
        assert counts == {"reduce_scatter": num_groups * len(micro_batches), "all_reduce": num_groups}
        assert set(steps.values()) == {number + 1}
        for x in micro_batches:
            reference(x).square().mean().backward()
        assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)
        model.zero_grad()
        reference.zero_grad()


class Branch(nn.Module):
    """Runs the block that it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.blocks[index](x)


@on_ranks(4)
@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_partial_sum_of_a_group_that_the_last_micro_batch_does_not_use_is_all_reduced_in_it(in_flight):
    model, reference = with_reference(Branch())
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=cpu_mesh(2, 2)).set_reduce_scatter_max_input_buffers(in_flight)
    for _ in range(2):
        for index, x in enumerate(batches(2)):
            model.set_requires_all_reduce(index == 1)
            model.set_is_last_backward(index == 1)
            model(own_chunk(x), index).square().mean().backward()
            reference(x, index).square().mean().backward()
        assert_equal_grads(grads_of(model), grads_of(reference))
        model.zero_grad()
        reference.zero_grad()


class Lender(nn.Module):
    """``table`` has two groups, by dtype; the one with the tied weight is lent to the root, whose ``head`` shares it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 7, bias=False)
        self.table = Table()
        self.table.linear.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7, bias=False)
        self.scale = nn.Parameter(torch.rand(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.float()


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("needs_input_grad", [False, True])
def test_the_other_groups_of_a_unit_that_lends_a_tied_parameter(needs_input_grad, unused):
    model, reference = with_reference(Lender())
    fully_shard(model.table, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    model.set_reduce_scatter_unused_params(unused)
    steps = steps_in_hooks(model)
    for number, x in enumerate(batches(2)):
        counts = count_reductions(lambda x=x: backward(model, own_chunk(x).clone().requires_grad_(needs_input_grad)))
        assert counts == {"reduce_scatter": 2, "all_reduce": 0}
        assert set(steps.values()) == {number + 1}
        backward(reference, x)
        for name, param in model.named_parameters():  # fp64 ones as well, whose gradients were fp32 on the way
            torch.testing.assert_close(param.grad.full_tensor().float(), reference.get_parameter(name).grad.float())
        model.zero_grad()
        reference.zero_grad()


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
