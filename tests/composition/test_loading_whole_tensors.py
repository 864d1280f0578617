"""``load_state_dict`` of an unsharded model's state dict, which every rank has: each cuts out its own pieces."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, transformer
from harness.sharding import shard_blocks
from harness.training import assert_trains_bitwise_as, fed_own_chunk


def placed(kind):
    """A sharded mlp with values of its own."""
    model = mlp(dim=11, seed=1)  # tensor parallel modules need even hidden dims
    if kind == "tensor parallel":
        mesh = cpu_mesh(1, 2, names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return shard_blocks(model, mesh=mesh["dp"])
    if kind == "last dim":
        return shard_blocks(model, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    return shard_blocks(model)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["rows", "last dim", "tensor parallel"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["before forward", "after forward"])
def test_whole_tensors_are_cut(kind, assign, when):
    model, whole = placed(kind), mlp(dim=11, seed=2)
    if when == "after forward":
        model(batches(1)[0])  # leaves the root unsharded
    state = whole.state_dict()
    kept = dict(state)
    model.load_state_dict(state, assign=assign)
    assert all(state[name] is value for name, value in kept.items())
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    torch.testing.assert_close(model(batches(1)[0]), whole(batches(1)[0]))


@on_ranks(2, 3)
def test_training_goes_on_from_them():
    model, whole = shard_blocks(mlp(seed=1)), mlp(seed=2)
    fed_own_chunk(model, batches(1))
    model.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert_trains_bitwise_as(model, whole, batches(2))


@on_ranks(2)
def test_ties_other_dtypes_missing_keys_and_wrong_shapes():
    model, whole = shard_blocks(transformer(tied=True, seed=1)), transformer(tied=True, seed=2).double()
    model.load_state_dict(whole.state_dict())
    assert model.head.weight is model.embedding.weight
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), whole.get_parameter(name).float()), name
    state = whole.state_dict()
    del state["norm.bias"]
    state["norm.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"(?s)norm\.bias.*size mismatch for norm\.weight"):
        model.load_state_dict(state)
