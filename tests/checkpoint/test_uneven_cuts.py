"""Rows cut twice, by tensor parallelism and by ``fully_shard``, that divide evenly over neither: nothing is lost or doubled.

Of 7 rows over (dp 3, tp 2), torch 2.13 tells DCP rows that overlap; a checkpoint then restored other values, without an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer, full_state_dict, load_safetensors, save_safetensors
from harness import cpu_mesh, on_ranks


def unsharded(hidden: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 6))


def cut_twice(hidden: int, world_size: int) -> nn.Sequential:
    mesh = cpu_mesh(world_size // 2, 2, names=("dp", "tp"))
    model = unsharded(hidden)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def assert_same_values(model: nn.Module, hidden: int) -> None:
    for (name, param), expected in zip(model.named_parameters(), unsharded(hidden).parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), name


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)


SIX = pytest.mark.parametrize("hidden", [9, 5, 7, 13])


@pytest.mark.slow
@on_ranks(6)
@SIX
def test_whole_tensors_are_those_of_the_unsharded_model(hidden: int, world_size: int) -> None:
    model = cut_twice(hidden, world_size)
    assert_same_values(model, hidden)
    full = full_state_dict(model)
    if dist.get_rank() == 0:
        for name, value in unsharded(hidden).state_dict().items():
            assert torch.equal(full[name], value), name


@pytest.mark.slow
@on_ranks(6)
@SIX
def test_safetensors_there_and_back(hidden: int, world_size: int, tmp_path: Path) -> None:
    model = cut_twice(hidden, world_size)
    save_safetensors(model, tmp_path, num_writers=None)
    spoil(model)
    load_safetensors(model, tmp_path)
    assert_same_values(model, hidden)
    spoil(model)
    model.load_state_dict(unsharded(hidden).state_dict())
    assert_same_values(model, hidden)


@on_ranks(4, 6)
@pytest.mark.parametrize("hidden", [5, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (9, 7, 13))])
def test_checkpointer(hidden: int, world_size: int, tmp_path: Path) -> None:
    """Into the same cut, and by DCP into an unsharded model."""
    model = cut_twice(hidden, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = param.detach().clone()  # torch's tensor parallelism cannot run such a model
    optimizer.step()
    expected = [param.full_tensor() for param in model.parameters()]
    moments = [optimizer.state[param]["exp_avg"].full_tensor() for param in model.parameters()]
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        spoil(model)
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].fill_(7.0)
        path = checkpointer.load().path
    for param, value, moment in zip(model.parameters(), expected, moments, strict=True):
        assert torch.equal(param.full_tensor(), value)
        assert torch.equal(optimizer.state[param]["exp_avg"].full_tensor(), moment)
    state = {"model": unsharded(hidden).state_dict()}
    dcp.load(state, checkpoint_id=path)
    for found, value in zip(state["model"].values(), expected, strict=True):
        assert torch.equal(found, value)


@pytest.mark.slow
@on_ranks(6)
@pytest.mark.parametrize("rows", [7, 13])
def test_torchs_own_tools_are_right_where_the_cuts_are_on_different_dims(rows: int, world_size: int, tmp_path: Path) -> None:
    """What docs/checkpoint.md recommends where rows do not divide: save and load, the optimizer too; and from a full state."""

    def whole(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(rows, 6), nn.Linear(6, 6, bias=False))

    def cut(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = cpu_mesh(world_size // 2, 2, names=("dp", "tp"))
        model = whole(seed)
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda param: Shard(1))
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    model, optimizer = cut(0)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path)
    other, loaded = cut(1)
    state = dict(zip("mo", get_state_dict(other, loaded), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(other, loaded, model_state_dict=state["m"], optim_state_dict=state["o"])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
        assert torch.equal(optimizer.state[one]["exp_avg"].full_tensor(), loaded.state[two]["exp_avg"].full_tensor())
    set_model_state_dict(other, whole(2).state_dict(), options=StateDictOptions(full_state_dict=True))
    for one, two in zip(whole(2).parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two.full_tensor())
