"""``copy.deepcopy`` of a sharded model gives an independent one that trains like a copy of the unsharded model."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPError, FSDPModule, fully_shard, register_fsdp_forward_method
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks
from harness.training import (
    assert_same_bits,
    assert_same_tensors,
    assert_trains_as,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    state_of,
)


def shares_memory(one, other):
    ranges = []
    for model in (one, other):
        storages = [p.to_local().untyped_storage() for p in model.parameters()]
        ranges.append([(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()])
    return any(a < d and c < b for a, b in ranges[0] for c, d in ranges[1])


@on_ranks(2, 3)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("after", [None, True, False])
def test_original_and_copy_train_independently(steps_before, after):
    reference = mlp()
    model = shard_blocks(mlp(), reshard_after_forward=after)
    fed_in_chunks(reference, batches(steps_before))
    fed_own_chunk(model, batches(steps_before))
    twin, reference_twin = copy.deepcopy(model), copy.deepcopy(reference)
    assert type(twin) is type(model)
    assert isinstance(twin.blocks[0], FSDPModule)
    assert not shares_memory(model, twin)
    assert_same_tensors(state_of(twin), state_of(reference), "copied value")
    for data, ours, theirs in ((2, model, reference), (3, twin, reference_twin), (4, model, reference), (5, twin, reference_twin)):
        assert_trains_bitwise_as(ours, theirs, batches(2, seed=data))


@on_ranks(4)
def test_a_copy_is_on_the_same_mesh_with_the_same_placements():
    model = shard_blocks(mlp(), mesh=cpu_mesh(2, 2))
    fed_own_chunk(model, batches(1))
    twin = copy.deepcopy(model)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert isinstance(ours, nn.Parameter)
        assert ours is not theirs
        assert ours.device_mesh is theirs.device_mesh
        assert ours.placements == theirs.placements
    reference = mlp()
    reference.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    assert_trains_as(twin, reference, batches(2, seed=3))


@on_ranks(2)
@pytest.mark.parametrize("how", ["unshard", "async", "forward"])
def test_a_model_that_is_unsharded_is_copied_sharded_and_stays_as_it_is(how):
    model = shard_blocks(mlp(), reshard_after_forward=False)
    if how == "forward":
        loss = model(batches()[0]).sum()
    else:
        handle = model.blocks[0].unshard(async_op=how == "async")
    twin = copy.deepcopy(model)
    assert all(isinstance(param, DTensor) for param in twin.parameters())
    if how == "async":
        handle.wait()
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    if how == "forward":
        loss.backward()
        assert all(param.grad is None for param in twin.parameters())
        model.zero_grad()
    model.reshard()
    model.blocks[0].reshard()
    assert_same_tensors(state_of(twin), state_of(model), "value")
    assert_trains_bitwise_as(twin, mlp(), batches(2))
    assert_trains_bitwise_as(model, mlp(), batches(2))


@on_ranks(4)
def test_a_model_resharded_to_fewer_ranks_is_copied():
    model = shard_blocks(mlp(), reshard_after_forward=2)
    loss = model(batches()[0]).sum()
    twin = copy.deepcopy(model)
    loss.backward()
    model.zero_grad()
    assert_same_bits(fed_own_chunk(twin, batches(2)), fed_own_chunk(model, batches(2)))


@on_ranks(2)
def test_a_copy_has_no_gradients_and_keeps_requires_grad_buffers_training_mode_and_marks():
    model = mlp()
    model.register_buffer("scale", torch.ones(3))
    model.first.bias.requires_grad_(False)
    model.last.weight.no_weight_decay = True
    shard_blocks(model).eval()
    model(batches()[0]).sum().backward()
    twin = copy.deepcopy(model)
    assert all(param.grad is None for param in twin.parameters())
    assert not twin.first.bias.requires_grad
    assert twin.last.weight.no_weight_decay
    assert twin.scale is not model.scale
    assert not twin.training
    assert not twin.blocks[0].training
    assert model.first.weight.grad is not None
    twin(batches()[0]).sum().backward()
    assert_same_tensors({n: p.grad for n, p in twin.named_parameters()}, {n: p.grad for n, p in model.named_parameters()}, "grad")


@on_ranks(2)
@pytest.mark.parametrize("own_unit", [(), ("embedding",), ("head",), ("embedding", "head"), ("head", "embedding")])
@pytest.mark.parametrize("inside", [False, True])
def test_ties_within_and_across_groups_are_kept(own_unit, inside):
    reference, model = transformer(tied=True), transformer(tied=True)
    for name in own_unit:
        fully_shard(getattr(model, name), mesh=cpu_mesh())
    shard_blocks(model)
    fed_own_chunk(model, token_batches(1))
    fed_in_chunks(reference, token_batches(1))
    # Inside a plain list the model is not the outermost thing that is copied.
    twin = copy.deepcopy(nn.ModuleList([model]))[0] if inside else copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight
    assert twin.head.weight is not model.head.weight
    expected = fed_in_chunks(copy.deepcopy(reference), token_batches(2, seed=3))
    for ours in (twin, model):
        for step, wanted in zip(fed_own_chunk(ours, token_batches(2, seed=3)), expected, strict=True):
            torch.testing.assert_close(step.loss, wanted.loss)
        assert ours.head.weight is ours.embedding.weight
    assert_same_tensors(state_of(twin), state_of(model), "value")


@on_ranks(2)
def test_a_submodule_that_is_a_unit_is_copied_alone():
    model = shard_blocks(mlp())
    fed_own_chunk(model, batches(1))
    block = copy.deepcopy(model.blocks[0])
    reference = mlp().blocks[0]
    reference.load_state_dict({name: tensor.full_tensor() for name, tensor in model.blocks[0].state_dict().items()})
    x = batches(2, shape=(12, 10), seed=4)
    before = state_of(model)
    assert_trains_bitwise_as(block, reference, x)
    assert_same_tensors(state_of(model), before, "value")


@on_ranks(2)
def test_units_of_several_modules_are_copied_whole():
    reference, model = mlp(), mlp()
    fully_shard([model.first, model.last], mesh=cpu_mesh())
    shard_blocks(model)
    holder = copy.deepcopy({"last": model.last, "model": model})
    twin = holder["model"]
    assert holder["last"] is twin.last
    assert twin.first._get_fsdp_state() is twin.last._get_fsdp_state()
    assert twin.first._get_fsdp_state() is not model.first._get_fsdp_state()
    assert_trains_bitwise_as(twin, reference, batches(2))


@on_ranks(2)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_copied_optimizer_trains_the_copied_model_from_the_same_state(optimizer_first):
    model = shard_blocks(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fed_own_chunk(model, batches(2), optimizer=optimizer)
    pair = copy.deepcopy([optimizer, model] if optimizer_first else [model, optimizer])
    twin, twin_optimizer = pair[::-1] if optimizer_first else pair
    expected = fed_own_chunk(model, batches(2, seed=3), optimizer=optimizer)
    assert_same_bits(fed_own_chunk(twin, batches(2, seed=3), optimizer=twin_optimizer), expected)
    state = {id(tensor) for entry in optimizer.state.values() for tensor in entry.values()}
    assert not state & {id(tensor) for entry in twin_optimizer.state.values() for tensor in entry.values()}


@on_ranks(2)
def test_settings_and_prefetch_are_copied():
    model = shard_blocks(mlp())
    model.set_gradient_divide_factor(1.0)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    twin = copy.deepcopy(model)
    unit = twin._get_fsdp_state()
    assert unit.groups[0].gradients.options.divide_factor == 1.0
    assert not unit.micro_batch.reduces
    assert not unit.micro_batch.reshards
    assert twin.blocks[0]._get_fsdp_state().options.prefetch_forward == [block._get_fsdp_state() for block in list(twin.blocks)[1:]]
    alone = copy.deepcopy(model.blocks[0])
    assert alone._get_fsdp_state().options.prefetch_forward == []


@on_ranks(2)
def test_hooks_of_the_user_keep_their_place_among_ours_and_ours_can_be_removed():
    model = mlp()
    seen = []
    model.blocks[0].register_forward_hook(lambda module, *_: seen.append(("before", type(module.up.weight).__name__)))
    shard_blocks(model, reshard_after_forward=True)
    model.blocks[0].register_forward_hook(lambda module, *_: seen.append(("after", type(module.up.weight).__name__)))
    twin = copy.deepcopy(model)
    twin(batches()[0])
    assert seen == [("before", "Parameter"), ("after", "DTensor")]
    for names in ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_pre_hooks"):
        assert len(getattr(twin.blocks[0], names)) == len(getattr(model.blocks[0], names)), names
    for block in (*twin.blocks, twin):
        block._get_fsdp_state().hooks.remove()
    for module in twin.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
    assert len(twin.blocks[0]._forward_hooks) == 2
    assert len(model.blocks[0]._forward_hooks) == 3


class Generator(nn.Linear):
    def generate(self, x):
        return self.weight @ x


@on_ranks(2)
def test_a_registered_forward_method_of_a_copy_uses_the_copy():
    model = fully_shard(Generator(3, 3), mesh=cpu_mesh())
    register_fsdp_forward_method(model, "generate")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert twin.generate(torch.ones(3)).abs().sum() == 0
    assert model.generate(torch.ones(3)).abs().sum() > 0


@on_ranks(2)
def test_a_recurrent_module_which_keeps_copies_of_its_parameters_is_copied():
    reference = nn.LSTM(4, 5)
    model = fully_shard(copy.deepcopy(reference), mesh=cpu_mesh())
    twin = copy.deepcopy(model)
    x = torch.randn(3, 2, 4)
    for ours in (twin, model):
        torch.testing.assert_close(ours(x)[0], reference(x)[0])


class WithOwnCopy(nn.Linear):
    """Copies itself in a way of its own, and leaves something out."""

    def __init__(self):
        super().__init__(3, 3)
        self.cannot_be_copied = iter(())

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "cannot_be_copied"}

    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        new.was_copied = True
        return new


@on_ranks(2)
def test_a_class_that_copies_itself_does_so():
    model = fully_shard(WithOwnCopy(), mesh=cpu_mesh())
    twin = copy.deepcopy(model)
    assert twin.was_copied
    assert type(twin) is type(model)
    assert not hasattr(twin, "cannot_be_copied")
    twin(torch.ones(1, 3)).sum().backward()
    assert twin.weight.grad is not None
    assert model.weight.grad is None


@on_ranks(2)
def test_the_model_is_whole_again_when_a_copy_fails():
    model = fully_shard(nn.Linear(3, 3), mesh=cpu_mesh())
    model.cannot_be_copied = (_ for _ in ())
    with pytest.raises(TypeError, match="generator"):
        copy.deepcopy(model)
    assert isinstance(model, FSDPModule)
    model(torch.ones(1, 3)).sum().backward()
    del model.cannot_be_copied
    copy.deepcopy(model)(torch.ones(1, 3)).sum().backward()


@on_ranks(2)
def test_single_parameters_and_state_dicts_are_copied():
    """Symptom: "invalid python storage" on ranks other than 0. Cause: the DTensor had the offset of its rows in the whole tensor."""
    model = shard_blocks(mlp())
    for steps in (0, 1):
        fed_own_chunk(model, batches(steps))
        kept = copy.deepcopy(model.state_dict())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fed_own_chunk(model, batches(1))
        assert_same_tensors(kept, before, "value")
        for param in model.parameters():
            twin = copy.deepcopy(param)
            assert isinstance(twin, nn.Parameter)
            assert torch.equal(twin.to_local(), param.to_local())


@on_ranks(2)
def test_a_model_on_the_meta_device_is_copied_and_both_are_materialised_apart():
    with torch.device("meta"):
        model = mlp()
    shard_blocks(model)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.to_empty(device="cpu")
        with torch.no_grad():
            for param in each.parameters():
                param.fill_(1.0 if each is model else 2.0)
    assert all((param.full_tensor() == 1).all() for param in model.parameters())
    assert all((param.full_tensor() == 2).all() for param in twin.parameters())
    assert not shares_memory(model, twin)


@on_ranks(2)
def test_an_exponential_moving_average_follows_the_unsharded_one():
    reference, model = mlp(), shard_blocks(mlp())
    average_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [torch.optim.swa_utils.AveragedModel(each, multi_avg_fn=average_fn) for each in (reference, model)]
    for step in range(3):
        fed_in_chunks(reference, batches(1, seed=step))
        fed_own_chunk(model, batches(1, seed=step))
        for average, each in zip(averages, (reference, model), strict=True):
            average.update_parameters(each)
    with torch.no_grad():
        torch.testing.assert_close(averages[1](batches()[0]), averages[0](batches()[0]))
    for name, param in averages[1].module.named_parameters():
        torch.testing.assert_close(param.full_tensor(), averages[0].module.get_parameter(name))


def pickle_inside(model):
    return pickle.dumps([model])


@on_ranks(2)
@pytest.mark.parametrize("what", [pickle.dumps, copy.copy, pickle_inside], ids=["pickle", "copy", "inside"])
def test_pickle_and_shallow_copies_are_refused_with_the_way_out(what):
    model = shard_blocks(mlp())
    with pytest.raises(FSDPError, match=r"(?s)FSDPMLP cannot be pickled.*fix: .*state_dict"):
        what(model)
