"""Backward runs more than once through a graph that is kept, and a unit was called more than once there.

Symptom: "setStorage ... out of bounds". Cause: the first backward forgot the calls that it had been through; the second reduced and
freed the unit after one of them, while another had begun. Smallest shape: one unit, called twice.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2 import OrderError, fully_shard
from harness import cpu_mesh, on_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.tanh(), self.weight)


class Twice(nn.Module):
    """One layer, called on ``x`` and once more: on what it returned, or beside that on ``x`` again."""

    def __init__(self, in_a_row: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer()
        self.in_a_row = in_a_row

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layer(x)
        return first, self.layer(first if self.in_a_row else x * 2)


def sharded(in_a_row: bool) -> nn.Module:
    model = Twice(in_a_row)
    fully_shard(model.layer, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


def batch(requires_grad: bool) -> Tensor:
    """The same on all ranks, so that the mean over them is the gradient of one."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(requires_grad)


def assert_trains_alike(model: nn.Module, reference: nn.Module) -> None:
    torch.testing.assert_close(model.layer.weight.grad.full_tensor(), reference.layer.weight.grad)


def losses_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [output.square().mean() for output in model(x)]


@on_ranks(2)
@pytest.mark.parametrize("in_a_row", [True, False])
@pytest.mark.parametrize("input_grad", [True, False])
def test_a_backward_for_each_part_of_one_stack_of_losses(in_a_row, input_grad):
    """Each of them passes through all calls, most with zeros."""
    model, reference = sharded(in_a_row), Twice(in_a_row)
    for each in (model, reference):
        first, second = torch.stack(losses_of(each, batch(input_grad))).unbind()
        first.backward(retain_graph=True)
        second.backward()
    assert_trains_alike(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("in_a_row", [True, False])
def test_a_penalty_on_the_gradient_and_then_two_backwards(in_a_row):
    model, reference = sharded(in_a_row), Twice(in_a_row)
    for each in (model, reference):
        x = batch(requires_grad=True)
        losses = losses_of(each, x)
        (grad,) = torch.autograd.grad(sum(losses), x, create_graph=True)
        first, second = torch.stack([losses[0] + grad.square().sum(), losses[1]]).unbind()
        first.backward(retain_graph=True)
        second.backward()
    assert_trains_alike(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("input_grad", [True, False])
def test_a_kept_graph_and_a_new_forward_in_one_backward(input_grad):
    model, reference = sharded(in_a_row=True), Twice(in_a_row=True)
    for each in (model, reference):
        kept = sum(losses_of(each, batch(input_grad)))
        kept.backward(retain_graph=True)
        new = sum(losses_of(each, batch(input_grad)))
        (kept + new).backward()
    assert_trains_alike(model, reference)


class Heads(nn.Module):
    """A trunk and two heads; a frozen one, whose input needs a gradient, is gathered by backward as well."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = Layer(), Layer(), Layer().requires_grad_(not frozen)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


def two_backwards(model: nn.Module, rank: int, differ: bool) -> None:
    """The first uses both heads; where ``differ``, the second uses another one on each rank."""
    left, right = model(torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)))
    (left + right).square().mean().backward(retain_graph=True)
    (right if differ and rank % 2 else left).mean().backward()


@on_ranks(2, timeout=120)
def test_a_second_backward_through_a_kept_graph_that_leaves_out_units_on_some_ranks_is_right_or_refused_on_all():
    """Symptom: gradients of one head were added to the other's, in silence; torch's FSDP2 gives the same wrong numbers.
    Cause: calls were forgotten after their backward, and kept units counted as unsharded after they had been resharded."""
    size = dist.get_world_size()
    for after, frozen, differ, unused in itertools.product((True, False, None), (True, False), (True, False), (True, False)):
        case = f"{after=} {frozen=} {differ=} {unused=}"
        model, reference = Heads(frozen), Heads(frozen)
        for each in (model.trunk, model.left, model.right, model):
            fully_shard(each, mesh=cpu_mesh(), reshard_after_forward=after)
        model.set_reduce_scatter_unused_params(unused)
        if differ and not unused:
            with pytest.raises(OrderError, match="2 units are not in the same backward on all ranks"):
                two_backwards(model, dist.get_rank(), differ)
            continue
        two_backwards(model, dist.get_rank(), differ)
        for rank in range(size):
            two_backwards(reference, rank, differ)
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            actual = None if param.grad is None else param.grad.full_tensor()
            mean = None if expected.grad is None else expected.grad / size
            torch.testing.assert_close(actual, mean, msg=lambda text, at=(case, name): f"{at}: {text}")


@on_ranks(2, timeout=30)
def test_ranks_agree_on_a_unit_that_waits_for_its_reduction_below_a_graph_that_one_of_them_keeps():
    """Symptom: a hang. Cause: each rank asked whether its own unit was unsharded before it joined the reduction or refused."""
    model, reference = Heads(frozen=False), Heads(frozen=False)
    for each in (model.trunk, model.left, model.right, model):
        fully_shard(each, mesh=cpu_mesh(), reshard_after_forward=False)
    x = torch.ones(3, 5)
    left, right = model(x)
    if dist.get_rank() == 0:
        right = torch.zeros(())
    model.set_requires_gradient_sync(False)
    (left.sum() + right.sum()).backward(retain_graph=True)
    model.set_requires_gradient_sync(True)
    left.sum().backward()
    left, right = reference(x)
    (2 * left.sum() + right.sum() / 2).backward()  # half of the ranks use the right one
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


class OneHead(Heads):
    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(self.trunk(x))


@on_ranks(2, timeout=60)
def test_a_loss_that_one_rank_keeps_makes_no_difference():
    """Symptom: ``losses.append(loss)`` on one rank made that rank alone compare with others, whose gathers it then met."""
    losses = []
    model, reference = OneHead(False), OneHead(False)
    for each in (model.trunk, model.left, model.right, model):
        fully_shard(each, mesh=cpu_mesh(), reshard_after_forward=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step, head in enumerate(("left", "left", "right", "left", "right")):
        model.set_requires_gradient_sync(step == 4)
        for each in (model, reference):
            for of_rank in [rank] if each is model else range(size):
                loss = each(torch.randn(3, 5, generator=torch.Generator().manual_seed(size * step + of_rank)), head).square().mean()
                loss.backward()
                if rank == 0 and each is model:
                    losses.append(loss)
                del loss
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / size)
