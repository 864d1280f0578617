"""torchao's 8-bit and 4-bit AdamW on our shards, ordinary and flat: the numbers are those that torch's FSDP2 has beside it."""

from __future__ import annotations

import copy
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp2 import fully_shard
from fsdp2.optim import flat
from harness import cpu_mesh, on_ranks


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_quantized_adamw_trains_as_on_torchs_fsdp2(name):
    torchao = pytest.importorskip("torchao.optim", reason="needs torchao")
    with mock.patch.object(torch, "compile", lambda function, **options: function):  # a minute each; numbers are what is looked at
        compare(torchao, name)


def compare(torchao: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 5))
    theirs, flattened = copy.deepcopy(ours), copy.deepcopy(ours)
    fully_shard(ours, mesh=cpu_mesh(2))
    fully_shard(flattened, mesh=cpu_mesh(2))
    torch_fully_shard(theirs, mesh=cpu_mesh(2))
    make = getattr(torchao, name)
    optimizers = [make(model.parameters(), lr=1e-2) for model in (ours, theirs)] + [flat(make, flattened, lr=1e-2)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    for step in range(3):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
        for model, optimizer, scheduler in zip((ours, theirs, flattened), optimizers, schedulers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    for param, expected, also in zip(ours.parameters(), theirs.parameters(), flattened.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected.full_tensor())
        assert torch.equal(also.full_tensor(), expected.full_tensor())
    weight = next(ours.parameters())
    moments = optimizers[0].state[weight]["exp_avg"].to_local()
    assert moments.block_size in (128, 256)
    assert moments.numel() == 128 * 128 // 2
    (kept, *_) = [each for each in optimizers[2].state_tensors() if type(each) is type(moments)]
    assert kept.numel() == 128 * 128 // 2
    assert torch.equal(optimizers[2].state[next(flattened.parameters())]["exp_avg"].to_local(), moments.dequantize())
    resumed = flat(make, flattened, lr=1e-2)
    resumed.load_state_dict(optimizers[0].state_dict())  # of the ordinary one
    resumed._current()
    assert [type(each) for each in resumed.state_tensors()] == [type(each) for each in optimizers[2].state_tensors()]
    assert torch.equal(resumed.state[next(flattened.parameters())]["exp_avg_sq"].to_local(), kept_squares(optimizers[0], weight))


def kept_squares(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    return optimizer.state[param]["exp_avg_sq"].to_local().dequantize()
