"""A first look at torch.distributed.checkpoint: state dict helpers, and files that torch's FSDP2 and other world sizes read."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as upstream
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import adamw, assert_equal_training, fed_in_chunks, fed_own_chunk

pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated", "ignore:.*__getstate__", "ignore:_get_pg_default_device", "ignore::FutureWarning"
)


def trained(seed=0, steps=2, fully_shard=fsdp2.fully_shard, mesh=None):
    """A sharded model and its optimizer after some steps."""
    model = mlp(seed=seed)
    shard_blocks(model, mesh=mesh, fully_shard=fully_shard)
    optimizer = adamw(model.parameters())
    fed_own_chunk(model, batches(steps), optimizer=optimizer)
    return model, optimizer


def check_same_training(model, optimizer, other, other_optimizer):
    ours = fed_own_chunk(model, batches(2, seed=9), optimizer=optimizer)
    theirs = fed_own_chunk(other, batches(2, seed=9), optimizer=other_optimizer)
    assert_equal_training(ours, theirs)


@on_ranks(2)
@pytest.mark.parametrize("full", [False, True])
def test_state_dict_helpers_carry_model_and_optimizer_to_another_model(full):
    model, optimizer = trained()
    other, other_optimizer = trained(seed=4, steps=0)
    options = StateDictOptions(full_state_dict=full)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    assert list(model_state) == list(mlp().state_dict())
    assert all(isinstance(tensor, DTensor) is not full for tensor in model_state.values())
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=copy.deepcopy(model_state),
        optim_state_dict=copy.deepcopy(optimizer_state),
        options=options,
    )
    check_same_training(other, other_optimizer, model, optimizer)


@on_ranks(2)
def test_a_full_state_dict_is_broadcast_from_rank_0():
    model, optimizer = trained()
    other, other_optimizer = trained(seed=4, steps=0)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(model, options=options)
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))  # ``step`` is the live tensor
    assert bool(model_state) is bool(optimizer_state) is (dist.get_rank() == 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, model_state, options=options)
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=options)
    check_same_training(other, other_optimizer, model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("saver", ["ours", "upstream"])
def test_dcp_files_are_read_by_torchs_fsdp2_and_the_reverse(saver, tmp_path):
    kinds = [fsdp2.fully_shard, upstream.fully_shard]
    if saver == "upstream":
        kinds.reverse()
    model, optimizer = trained(fully_shard=kinds[0])
    other, other_optimizer = trained(seed=4, steps=1, fully_shard=kinds[1])
    save(model, optimizer, tmp_path)
    load(other, other_optimizer, tmp_path)
    check_same_training(other, other_optimizer, model, optimizer)


@on_ranks(4)
def test_dcp_files_are_read_by_fewer_ranks(tmp_path):
    model, optimizer = trained()
    save(model, optimizer, tmp_path)
    halves = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    for mesh in (halves, halves["shard"]):
        other, other_optimizer = trained(seed=4, steps=0, mesh=mesh)
        load(other, other_optimizer, tmp_path)
        for name, param in other.named_parameters():
            assert torch.equal(param.full_tensor(), model.get_parameter(name).full_tensor())
            for key in ("exp_avg", "exp_avg_sq"):
                state = other_optimizer.state[param][key], optimizer.state[model.get_parameter(name)][key]
                assert torch.equal(state[0].full_tensor(), state[1].full_tensor())


@on_ranks(2)
def test_dcp_files_are_read_by_the_unsharded_model(tmp_path):
    model, optimizer = trained()
    save(model, optimizer, tmp_path)
    plain = mlp(seed=4)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
    reference = mlp()
    fed_in_chunks(reference, batches(2), adamw)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[name], tensor, atol=1e-6, rtol=1e-6)


def save(model, optimizer, tmp_path):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(tmp_path / "checkpoint"))


def load(model, optimizer, tmp_path):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
