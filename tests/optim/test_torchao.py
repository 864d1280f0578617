"""torchao's 8-bit AdamW on our shards: quantised states where blocks fit, with the numbers that torch's FSDP2 has beside it."""

from __future__ import annotations

import copy
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp2 import fully_shard
from fsdp2.errors import ArgumentError
from fsdp2.optim import flat
from harness import cpu_mesh, on_ranks


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_quantised_adamw_trains_as_on_torchs_fsdp2(name):
    torchao = pytest.importorskip("torchao.optim", reason="needs torchao")
    with mock.patch.object(torch, "compile", lambda function, **options: function):  # a minute each; numbers are what is looked at
        compare(torchao, name)


def compare(torchao: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 5))
    theirs = copy.deepcopy(ours)
    fully_shard(ours, mesh=cpu_mesh(2))
    torch_fully_shard(theirs, mesh=cpu_mesh(2))
    optimizers = [getattr(torchao, name)(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    for step in range(3):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected.full_tensor())
    weight = next(ours.parameters())
    moments = optimizers[0].state[weight]["exp_avg"].to_local()
    assert moments.block_size in (128, 256)
    assert moments.numel() == 128 * 128 // 2
    with pytest.raises(ArgumentError, match="blocks of"):
        flat(getattr(torchao, name), ours)
