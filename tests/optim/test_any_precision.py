"""``AnyPrecisionAdamW``: AdamW in fp32, and in bf16 what follows fp32 where plain bf16 AdamW stands still."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.errors import ArgumentError
from fsdp2.optim import AnyPrecisionAdamW, flat
from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[Tensor]:
    for x in batches(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in model.parameters()]


def test_in_fp32_it_is_adamw_bit_for_bit():
    ours, theirs = mlp(), mlp()
    found = train(ours, AnyPrecisionAdamW(ours.parameters(), lr=0.01, weight_decay=0.1))
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1, foreach=False))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.detach(), other)


def test_states_have_the_dtypes_that_were_asked_for():
    model = mlp().to(torch.bfloat16)
    optimizer = AnyPrecisionAdamW(
        model.parameters(), momentum_dtype=torch.bfloat16, variance_dtype=torch.float32, use_kahan_summation=True
    )
    model(batches(1)[0].to(torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state[next(model.parameters())]
    assert state["exp_avg"].dtype is torch.bfloat16
    assert state["exp_avg_sq"].dtype is torch.float32
    assert state["compensation"].dtype is torch.bfloat16


def distance_after(dtype: torch.dtype, optimizer_class: type[torch.optim.Optimizer], **options: object) -> float:
    """How far a weight of 4 is from its target of 4.2 after 600 steps of at most 1e-3; in bf16, the neighbors of 4 are 1/32 away."""
    weight = nn.Parameter(torch.full((8,), 4.0, dtype=dtype))
    optimizer = optimizer_class([weight], lr=1e-3, weight_decay=0.0, **options)
    for _ in range(600):
        (weight.float() - 4.2).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float((weight.detach().float() - 4.2).abs().max())


def test_kahan_summation_follows_fp32_where_plain_bf16_stands_still():
    assert distance_after(torch.float32, torch.optim.AdamW) < 0.01
    assert distance_after(torch.bfloat16, torch.optim.AdamW) == pytest.approx(0.2)  # it has not moved
    assert distance_after(torch.bfloat16, AnyPrecisionAdamW, use_kahan_summation=True) <= 1 / 64 + 0.01  # half a step of bf16


@on_ranks(2)
@pytest.mark.parametrize("is_flat", [False, True])
def test_sharded_it_computes_what_the_unsharded_model_has(is_flat: bool):
    def make(dtype: torch.dtype) -> nn.Module:
        return mlp().to(dtype)

    sharded, unsharded = make(torch.bfloat16), make(torch.bfloat16)
    shard_blocks(sharded)
    options = {"lr": 0.01, "variance_dtype": torch.float32, "use_kahan_summation": True}
    optimizer = flat(AnyPrecisionAdamW, sharded, **options) if is_flat else AnyPrecisionAdamW(sharded.parameters(), **options)
    ordinary = AnyPrecisionAdamW(unsharded.parameters(), **options)
    for x in batches(4):
        for model, each in ((sharded, optimizer), (unsharded, ordinary)):
            model(x.to(torch.bfloat16)).square().mean().backward()
            each.step()
            each.zero_grad()
    for one, other in zip(sharded.parameters(), unsharded.parameters(), strict=True):
        assert torch.equal(
            one.full_tensor().cpu(), other
        )  # all ranks have the same data, and two equal bf16 gradients average without rounding


def test_values_out_of_range_are_refused_by_name():
    weight = nn.Parameter(torch.zeros(2))
    for options in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            AnyPrecisionAdamW([weight], **options)
