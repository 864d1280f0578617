"""Modules that are below themselves: a block that knows its owner, neighbors that know each other.

Symptom: RecursionError in the first forward. Cause: names of parameters were listed with ``remove_duplicate=False``, which follows a
cycle for ever. torch itself cannot cast, save or switch the training mode of such a model.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import clip_grad_norm_, fully_shard, materialize, parallelize
from fsdp2.checkpoint import load_safetensors, save_safetensors
from fsdp2.compat import FullyShardedDataParallel, MixedPrecision
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import (
    adamw,
    assert_equal_training,
    assert_same_tensors,
    fed_own_chunk,
    fed_whole,
    own_chunk,
    state_of,
)


def let_blocks_know_their_owner(model: nn.Module) -> None:
    for block in model.blocks:
        block.owner = model


def let_neighbors_know_each_other(model: nn.Module) -> None:
    for one, other in zip(model.blocks[:-1], model.blocks[1:], strict=True):
        one.next, other.previous = other, one


def let_a_plain_part_know_the_model(model: nn.Module) -> None:
    model.last.model = model


def by_fsdp1(model: nn.Module) -> None:
    for block in model.blocks:
        FullyShardedDataParallel(block, device_mesh=cpu_mesh())
    FullyShardedDataParallel(model, device_mesh=cpu_mesh())


CYCLES = [let_blocks_know_their_owner, let_neighbors_know_each_other, let_a_plain_part_know_the_model]


@on_ranks(2)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("shard", [shard_blocks, pytest.param(by_fsdp1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cycle", CYCLES)
def test_a_cycle_that_is_made_after_sharding_changes_nothing(cycle, shard, steps_before):
    model, whole = mlp(), mlp()
    shard(model)
    inputs = batches(2 + steps_before)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    fed_own_chunk(model, inputs[:steps_before], optimizer=optimizers[0])
    fed_whole(whole, inputs[:steps_before], lambda params: optimizers[1])
    cycle(model)
    cycle(whole)
    steps = fed_own_chunk(model, inputs[steps_before:], optimizer=optimizers[0])
    assert_equal_training(steps, fed_whole(whole, inputs[steps_before:], lambda params: optimizers[1]))


@on_ranks(2)
@pytest.mark.parametrize("shard", ["fully_shard", "parallelize", "fsdp1 with buffers cast"])
def test_a_model_with_cycles_is_sharded(shard):
    model, whole = mlp(), mlp()
    let_blocks_know_their_owner(model)
    if shard == "fully_shard":
        fully_shard(model, mesh=cpu_mesh())
    elif shard == "parallelize":
        parallelize(model, wrap=None, mesh=cpu_mesh())
    else:
        FullyShardedDataParallel(model, device_mesh=cpu_mesh(), mixed_precision=MixedPrecision(buffer_dtype=torch.float64))
    assert_equal_training(fed_own_chunk(model, batches(2)), fed_whole(whole, batches(2)))


@on_ranks(2)
@pytest.mark.parametrize("cycle", CYCLES)
def test_a_sharded_model_with_cycles_is_copied_clipped_saved_and_loaded(cycle, tmp_path):
    model = mlp()
    shard_blocks(model)
    cycle(model)
    twin = copy.deepcopy(model)
    assert_equal_training(fed_own_chunk(twin, batches(2), adamw), fed_own_chunk(model, batches(2), adamw))
    model(own_chunk(batches(1)[0])).sum().backward()
    total = clip_grad_norm_(model.parameters(), 0.5)
    assert total > 0.5
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), torch.tensor(0.5), rtol=1e-5, atol=0)
    save_safetensors(model, tmp_path / "saved")
    other = mlp(seed=3)
    shard_blocks(other)
    cycle(other)
    load_safetensors(other, tmp_path / "saved")
    assert_same_tensors(state_of(other), state_of(model), "value")


class Owned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_ranks(2)
def test_a_model_with_cycles_is_materialised():
    def made() -> nn.Module:
        return nn.Sequential(Owned(), Owned())

    whole = made()
    for module in whole.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    with torch.device("meta"):
        model = made()
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    model[0].owner = model
    torch.manual_seed(0)
    materialize(model)
    assert all(param.to_local().isfinite().all() for param in model.parameters())
    assert model(torch.ones(2, 4)).shape == (2, 4)
