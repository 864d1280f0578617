"""Whoever computes in bf16 over fp32 parameters is told once what torch 2.15's default costs, and which line keeps the old traffic."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import MixedPrecisionPolicy, fully_shard, set_semantics, user_warnings
from fsdp2.torch_names import torch_tensors
from harness import cpu_mesh, on_ranks

BF16 = torch.bfloat16


@contextlib.contextmanager
def as_if_nobody_was_told(installed: str) -> Iterator[list[str]]:
    """The messages that are logged in a process that has just begun, by the semantics of that version of torch."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fsdp2")
    before = user_warnings._told, torch_tensors.INSTALLED_SEMANTICS, logger.propagate
    user_warnings._told, torch_tensors.INSTALLED_SEMANTICS, logger.propagate = set(), installed, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        user_warnings._told, torch_tensors.INSTALLED_SEMANTICS, logger.propagate = before


def shard(**options: object) -> None:
    dtype = options.pop("dtype", torch.float32)
    model = nn.Linear(512, 512, bias=False, dtype=dtype)
    if options.pop("sets_grad_dtype", False):
        model.weight.grad_dtype = BF16
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(**options))


@on_ranks(2)
def test_rank_0_is_told_once_what_the_default_costs_and_which_line_keeps_the_old_traffic():
    with as_if_nobody_was_told("2.15") as said:
        for _ in range(2):
            shard(param_dtype=BF16)
    assert len(said) == (1 if dist.get_rank() == 0 else 0)
    for message in said:
        assert "This Linear reduces 1024 KiB of gradients a step, where torch 2.14 reduced 512." in message
        assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)" in message
        assert 'fsdp2.set_semantics("2.13")' in message


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"param_dtype": BF16, "reduce_dtype": BF16},
        {"param_dtype": BF16, "reduce_dtype": torch.float32},
        {"param_dtype": BF16, "sets_grad_dtype": True},
        {"dtype": BF16},
    ],
    ids=["no mixed precision", "reduced in bf16", "reduced in fp32", "grad_dtype", "bf16 parameters"],
)
def test_nothing_is_said_where_gradients_travel_as_before_or_the_user_has_chosen(options):
    with as_if_nobody_was_told("2.15") as said:
        shard(**options)
    assert said == []


@on_ranks(2)
@pytest.mark.parametrize("version", ["2.13", "2.15"])
def test_nothing_is_said_after_set_semantics_nor_before_torch_2_15(version):
    with as_if_nobody_was_told("2.15") as said:
        set_semantics(version)
        try:
            shard(param_dtype=BF16)
        finally:
            set_semantics("torch")
    with as_if_nobody_was_told("2.13") as said_before:
        shard(param_dtype=BF16)
    assert said + said_before == []
