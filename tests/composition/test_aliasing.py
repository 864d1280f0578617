"""Sharded parameters are pieces of one flat buffer, and nobody outside notices: what is saved, and what is taken for tied."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import adamw_foreach, adamw_one_by_one, own_chunk, sgd_foreach, sgd_one_by_one

OVERHEAD_NBYTES = 6000  # of torch.save for one DTensor: names, shapes, the mesh


def wide():
    """One group of four (64, 64) parameters; on 2 ranks each keeps 8 KiB of 16 KiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    return fully_shard(model, mesh=cpu_mesh())


def saved_nbytes(what):
    buffer = io.BytesIO()
    torch.save(what, buffer)
    return buffer.tell()


def local_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@on_ranks(1, 2)
def test_saving_one_entry_writes_its_own_bytes(world_size):
    model = wide()
    entry = model.state_dict()["1.weight"]
    own = 64 * 64 * 4 // world_size
    assert entry.to_local().untyped_storage().nbytes() == own
    assert own <= saved_nbytes(entry.to_local()) < own + OVERHEAD_NBYTES
    assert own <= saved_nbytes(model[1].weight.detach().to_local()) < own + OVERHEAD_NBYTES
    assert saved_nbytes({"a": entry.to_local()}) < own + OVERHEAD_NBYTES


@on_ranks(2)
@pytest.mark.parametrize("make", [adamw_foreach, adamw_one_by_one, sgd_foreach, sgd_one_by_one])
def test_saving_the_state_of_one_parameter_writes_its_own_bytes(make):
    model = wide()
    optimizer = make(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    own = 64 * 64 * 4 // 2
    for tensor in optimizer.state[model[2].weight].values():
        if isinstance(tensor, DTensor):
            assert saved_nbytes(tensor.to_local()) < own + OVERHEAD_NBYTES
            assert tensor.to_local().untyped_storage().nbytes() == own


@on_ranks(2)
def test_a_whole_state_dict_is_saved_once_and_loads_into_the_unsharded_model():
    model = mlp()
    fully_shard(model, mesh=cpu_mesh())
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    nbytes = sum(tensor.nbytes for tensor in full.values())
    assert saved_nbytes(full) < nbytes + 1000 * len(full)
    other = mlp(seed=5)
    other.load_state_dict(full)
    for name, tensor in mlp().state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


@on_ranks(1, 2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_one_kept_gradient_holds_the_gradients_of_its_group_and_no_more(policy, world_size):
    """The bound: this rank's share of the group's gradients, in reduce dtype, with padding, and one flag for each parameter."""
    model = mlp()
    shard_blocks(model, mp_policy=policy)
    model(own_chunk(batches(1)[0])).sum().backward()
    kept = model.blocks[1].up.weight.grad.to_local()
    of_group = sum(param.to_local().numel() for param in model.blocks[1].parameters()) * 4
    align = 128 * (1 if policy.param_dtype is None else 2)  # 128 bytes of the smallest dtype in use
    num_params = len(list(model.blocks[1].parameters()))
    assert kept.untyped_storage().nbytes() <= of_group + (num_params + 1) * align + num_params * 4 * world_size
    others = {param.grad.to_local().untyped_storage().data_ptr() for param in model.blocks[2].parameters()}
    assert kept.untyped_storage().data_ptr() not in others
    own = kept.clone()  # the way out
    assert own.untyped_storage().nbytes() == own.nbytes


@on_ranks(1, 2, 3)
def test_no_two_parameters_look_tied_and_tied_ones_do():
    model = mlp()
    model.last2 = nn.Linear(10, 5)
    model.last2.weight = model.last.weight
    fully_shard(model, mesh=cpu_mesh())
    places = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        local = param.to_local()
        if local.numel():
            places.setdefault(local.untyped_storage().data_ptr(), []).append(name)
            assert local.storage_offset() == 0
    assert [names for names in places.values() if len(names) > 1] == [["last.weight", "last2.weight"]]


@on_ranks(1, 2, 3)
def test_safetensors_sees_no_shared_storage_among_the_shards(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = mlp()
    fully_shard(model, mesh=cpu_mesh())
    local = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    path = str(tmp_path / f"{dist.get_rank()}.safetensors")
    safetensors.save_file(local, path)  # raises for tensors that share memory
    loaded = safetensors.load_file(path)
    for name, tensor in local.items():
        assert torch.equal(loaded[name], tensor)


@on_ranks(1)
def test_full_tensor_on_one_rank_is_the_live_shard_as_for_any_dtensor():
    """DTensor's own rule, torch's FSDP2 included: redistributing to the placement that is there copies nothing."""
    model = wide()
    full = model[0].weight.full_tensor()
    assert full.data_ptr() == model[0].weight.to_local().data_ptr()
    kept = full.clone()
    with torch.no_grad():
        model[0].weight.zero_()
    assert full.abs().sum() == 0
    assert kept.abs().sum() > 0


@on_ranks(2)
def test_full_tensor_on_several_ranks_is_a_copy():
    model = wide()
    full = model[0].weight.full_tensor()
    with torch.no_grad():
        model[0].weight.zero_()
    assert full.abs().sum() > 0


# --- transformers -------------------------------------------------------------------------------------------------------------


def language_model(tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@on_ranks(1, 2, timeout=300)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("root_only", [False, True])
def test_save_pretrained_of_a_sharded_transformers_model_loses_no_key(tied, root_only, tmp_path):
    reference, model = language_model(tied), language_model(tied)
    for layer in () if root_only else model.model.layers:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    ids = torch.arange(12).view(2, 6)
    expected = reference(input_ids=ids, labels=ids)
    loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad)
    # Whole tensors: every rank takes part in gathering, one saves.
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    path = tmp_path / "model"
    if dist.get_rank() == 0:
        model.save_pretrained(path, state_dict=full, safe_serialization=True)
    dist.barrier()
    loaded = type(reference).from_pretrained(path)
    assert loaded.state_dict().keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@on_ranks(1, 2, timeout=300)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # transformers' own call
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_recognizes_exactly_the_tied_weights(tied):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import id_tensor_storage

    model = language_model(tied)
    fully_shard(model, mesh=cpu_mesh())
    places = {}
    for name, tensor in model.state_dict().items():
        places.setdefault(id_tensor_storage(tensor), []).append(name)
    shared = [sorted(names) for names in places.values() if len(names) > 1]
    assert shared == ([["lm_head.weight", "model.embed_tokens.weight"]] if tied else [])
