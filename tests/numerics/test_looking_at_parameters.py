"""Whoever lists parameters, on whichever ranks and at whatever moment, changes nothing and communicates nothing."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from fsdp2.core.comm import collectives
from harness import cpu_mesh, on_ranks
from harness.sharding import with_reference
from harness.training import assert_trains_bitwise_as


class Blocks(nn.Module):
    """Linear layers of one shape: the gradients of one fit another, so that a swap raises nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def sharded_blocks(after: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, reference = with_reference(Blocks())
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), reshard_after_forward=after)
    return fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after), reference


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, 7, generator=generator) for _ in range(3)]


def look(model: nn.Module) -> None:
    """What loggers do: sizes, names and gradients."""
    assert len(list(model.parameters())) == 6
    for name, param in model.named_parameters():
        assert name.startswith("blocks.")
        assert param.shape[0] == 7
        _ = param.grad
    for block in model.blocks:
        list(block.parameters())


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("when", ["before backward", "after backward", "both"])
def test_one_rank_may_list_parameters_between_forward_and_a_backward_that_neither_reduces_nor_reshards(when, after):
    """Symptom: that rank gathered in the order of the modules what the others gather in that of backward; all gradients were wrong."""
    model, reference = sharded_blocks(after)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        losses = []
        halves = x.chunk(2)
        for index, half in enumerate(halves):
            is_last = index == len(halves) - 1
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
            loss = model(half).square().mean()
            if isinstance(model, FSDPModule) and dist.get_rank() == 0 and when != "after backward":
                look(model)
            loss.backward()
            if isinstance(model, FSDPModule) and dist.get_rank() == 0 and when != "before backward":
                look(model)
            losses.append(loss)
        return torch.stack(losses).mean()

    assert_trains_bitwise_as(model, reference, inputs(), iteration=iteration)


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False])
def test_no_getter_communicates(after):
    """At every moment outside of a forward, under every combination of the flags of a backward."""
    model, _ = sharded_blocks(after)
    x = inputs()[0][: 12 // 2]

    def look_everywhere() -> None:
        with mock.patch.object(collectives, "all_gather", side_effect=AssertionError("a getter communicates")):
            look(model)
            list(model.named_modules())
            model.state_dict()
            list(model.named_buffers())
            look(model)

    for is_last in (True, False):
        for syncs in (True, False):
            for reshards in (True, False):
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(syncs)
                model.set_reshard_after_backward(reshards)
                look_everywhere()
                loss = model(x).sum()
                look_everywhere()
                loss.backward()
                look_everywhere()


@on_ranks(2)
@pytest.mark.parametrize("method", ["parameters", "state_dict"])
def test_one_rank_may_look_between_two_forwards_of_one_backward(method):
    """Symptom: at the second forward that rank gathered again what the others still had, and gloo aborted."""
    model, reference = sharded_blocks(False)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        loss = model(first).square().mean()
        if isinstance(model, FSDPModule) and dist.get_rank() == 0:
            list(getattr(model, method)())
        loss = loss + model(second).square().mean()
        loss.backward()
        model(first)  # and a forward without a backward, before the gradients that it leaves are used
        if isinstance(model, FSDPModule) and dist.get_rank() == 0:
            list(getattr(model, method)())
        with torch.no_grad():
            model(second)
        return loss

    assert_trains_bitwise_as(model, reference, inputs(), iteration=iteration)
