"""The certificate finds by what gradients are divided, and names parameters whose divisor is not the declared one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from fsdp2 import doctor
from fsdp2.doctor.loss_weights import Heard, scale_of
from harness import cpu_mesh, on_ranks
from harness.models import mlp
from harness.sharding import shard_blocks


def sharded(*mesh: int) -> Any:
    model = mlp()
    return shard_blocks(model, mesh=cpu_mesh(*mesh))


def losses(model: Any, num_rows: int, index: int = 0) -> Tensor:
    torch.manual_seed(2 * dist.get_rank() + index)
    return model(torch.randn(num_rows, 7)).square().mean(1)


def micro_batches(model: Any, divide_by: int) -> Callable[[Any], None]:
    def step(probe: Any) -> None:
        for index in range(2):
            with fsdp2.accumulate(model, last=index == 1):
                (probe(losses(model, 3, index)).mean() / divide_by).backward()

    return step


@on_ranks(2)
@pytest.mark.parametrize("mesh", [(2,), (2, 1)])
def test_every_divisor_is_measured_and_those_that_differ_are_named(mesh):
    model = sharded(*mesh)
    right = doctor.gradient_scales(model, micro_batches(model, 2))
    assert right.num_tokens == 12
    assert not right.report, right.report
    assert list(right.divisors.values()) == pytest.approx([12.0] * len(right.divisors), rel=1e-3)
    assert all(param.grad is None for param in model.parameters())

    undivided = doctor.gradient_scales(model, micro_batches(model, 1))
    assert [finding.check for finding in undivided.report] == ["gradient-scale"]
    assert len(undivided.report[0].params) == len(right.divisors)
    assert "divided by 6, and not by 12" in undivided.report[0].what

    model.blocks[1].set_gradient_divide_factor(4)  # as if the tokens of four ranks came to an expert
    (finding,) = doctor.gradient_scales(model, micro_batches(model, 2)).report
    assert {name.rsplit(".", 2)[0] for name in finding.params} <= {"blocks.1", "blocks"}
    assert "blocks.1.up.weight" in finding.params
    assert "divided by 24, and not by 12" in finding.what
    assert not doctor.gradient_scales(model, micro_batches(model, 2), declared=lambda name: 24 if "blocks.1" in name else 12).report

    def unprobed(probe: Any) -> None:
        losses(model, 3).sum().backward()

    model.blocks[1].set_gradient_divide_factor(None)
    assert not doctor.gradient_scales(model, unprobed).report

    def uneven(probe: Any) -> None:
        probe(losses(model, 2 + 2 * dist.get_rank())).mean().backward()

    def even(probe: Any) -> None:
        (probe(losses(model, 2 + 2 * dist.get_rank())).sum() * 2 / 6).backward()

    assert "token-weights" in [finding.check for finding in doctor.gradient_scales(model, uneven).report]
    assert not doctor.gradient_scales(model, even).report


@on_ranks(2)
def test_padding_whose_loss_is_zero_is_no_token_unless_the_mean_counts_it():
    model = sharded(2)
    labels = torch.tensor([[1, -100, -100], [2, 3, -100]])[dist.get_rank()]

    def step(divide_by: float) -> Callable[[Any], None]:
        def run(probe: Any) -> None:
            torch.manual_seed(dist.get_rank())
            each = torch.nn.functional.cross_entropy(model(torch.randn(3, 7)), labels, ignore_index=-100, reduction="none")
            (probe(each).sum() * 2 / divide_by).backward()

        return run

    right = doctor.gradient_scales(model, step(3))
    assert not right.report, right.report
    assert right.num_tokens == 3
    of_all = doctor.gradient_scales(model, step(6))
    assert not of_all.report, of_all.report
    assert of_all.num_tokens == 6
    (finding,) = doctor.gradient_scales(model, step(12)).report
    assert "divided by 12, and not by 3" in finding.what


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_losses_that_are_not_finite_have_no_scale(weight):
    """The check for finite losses names them; this one once raised in the user's step."""
    by_rank = [[Heard(weight, 4)], [Heard(0.25, 4)]]
    assert list(scale_of(by_rank, factor=2.0, accumulates=True)) == []
