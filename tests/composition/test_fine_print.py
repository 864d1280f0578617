"""What users do to a sharded model beside training it: cast it, replace and add parameters, slice, load, and ask what it is."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import (
    ArgumentError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParameterError,
    fully_shard,
)
from harness import cpu_mesh, on_ranks
from harness.models import Block, batches, mlp, transformer
from harness.sharding import shard_blocks
from harness.training import (
    adamw,
    assert_equal_grads,
    assert_equal_training,
    assert_same_bits,
    assert_same_tensors,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    grads_of,
    own_chunk,
    sgd,
    state_of,
)
from harness.user_warnings import warned_on_rank_0

# --- dtypes -------------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_casting_the_model_after_sharding(steps_before, dtype):
    reference, model = mlp(), shard_blocks(mlp())
    fed_in_chunks(reference, batches(steps_before))
    fed_own_chunk(model, batches(steps_before))
    reference.to(dtype)
    model.to(dtype)
    assert {param.dtype for param in model.parameters()} == {dtype}
    inputs = [x.to(dtype) for x in batches(2, seed=3)]
    ours, theirs = fed_own_chunk(model, inputs, sgd), fed_in_chunks(reference, inputs, sgd)
    if dtype is torch.float64:
        assert_same_bits(ours, theirs)
    elif dist.get_world_size() == 2:  # a third is no bf16 number; and SGD in bf16 rounds by where in a vector an element stands
        assert_same_tensors(ours[0].grads, theirs[0].grads, "gradient")
    model(own_chunk(inputs[0])).sum().backward()
    for param in model.parameters():
        assert param.grad.dtype is param.grad.to_local().dtype is param.grad._spec.tensor_meta.dtype is dtype


@on_ranks(2)
def test_casting_with_gradients_casts_them_too():
    reference, model = mlp(), shard_blocks(mlp())
    for each in (reference, model):
        each(batches(1)[0]).sum().backward()
        each.double()
        each(batches(1)[0].double()).sum().backward()
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=2.0**31)  # one of the two summands has the precision of fp32


class NormAndHead(nn.Module):
    """The parts that share a group are apart in the tree, with another unit between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(7)
        self.block = nn.Linear(7, 7)
        self.tail = nn.ModuleDict({"head": nn.Linear(7, 5)})

    def forward(self, x: Tensor) -> Tensor:
        return self.tail["head"](self.block(self.norm(x)))

    def shard(self) -> NormAndHead:
        fully_shard(self.block, mesh=cpu_mesh())
        fully_shard([self.norm, self.tail["head"]], mesh=cpu_mesh())
        return fully_shard(self, mesh=cpu_mesh())


@on_ranks(2)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("cast", [nn.Module.double, nn.Module.bfloat16])
@pytest.mark.parametrize("swaps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_casting_modules_that_are_one_group_part_by_part(cast, steps_before, swaps):
    """Symptom: ParameterError in the middle of ``model.double()``, with one part cast. Smallest shape: a list unit below any module."""
    reference, model = NormAndHead(), NormAndHead().shard()
    inputs = batches(3)
    optimizer = sgd(model.parameters())
    fed_own_chunk(model, inputs[:steps_before], optimizer=optimizer)
    plain_optimizer = sgd(reference.parameters())
    fed_in_chunks(reference, inputs[:steps_before], lambda _: plain_optimizer)
    before = list(model.parameters())
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        assert cast(model) is model
        cast(reference)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    dtype = reference.block.weight.dtype
    assert {param.dtype for param in model.parameters()} == {dtype}
    inputs = [x.to(dtype) for x in inputs[steps_before:]]
    steps = fed_own_chunk(model, inputs, optimizer=optimizer)
    expected = fed_in_chunks(reference, inputs, lambda _: plain_optimizer)
    if dtype is torch.float64:
        assert_same_bits(steps, expected)
    else:
        assert_equal_training(steps, expected, bound=1e-2)


@on_ranks(2)
def test_moving_modules_that_are_one_group_off_the_meta_device_part_by_part():
    with torch.device("meta"):
        model = NormAndHead().shard()
    model.to_empty(device="cpu")
    model.load_state_dict(NormAndHead().state_dict())
    assert_trains_bitwise_as(model, NormAndHead(), batches(1))


@on_ranks(2)
def test_casting_one_of_the_modules_that_are_one_group_is_refused_when_they_run():
    model = NormAndHead().shard()
    model.norm.double()
    with pytest.raises(
        ParameterError, match=r"(?s)(?=.*norm.weight \(7,\) torch.float64)(?=.*head.weight \S+ \S+ torch.float32).*fix:.*whole module"
    ):
        model(batches(1)[0])
    model.reset_iter_state()
    model.double()
    model(batches(1)[0].double()).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_casting_a_part_of_a_group_is_refused_with_every_dtype(steps_before):
    model = shard_blocks(mlp())
    fed_own_chunk(model, batches(steps_before))
    model.blocks[0].norm.to(torch.bfloat16)
    with pytest.raises(
        ParameterError, match=r"(?s)(?=.*norm.weight \(10,\) torch.bfloat16)(?=.*up.weight \S+ \S+ torch.float32).*fix:.*whole module"
    ):
        model(batches(1)[0])
    model.reset_iter_state()
    model.to(torch.float32)
    fed_own_chunk(model, batches(1))


# --- parameters that are replaced and added -----------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_parameter_replaced_by_one_that_is_sharded_alike_is_adopted(steps_before):
    reference, model = mlp(), shard_blocks(mlp())
    fed_in_chunks(reference, batches(steps_before))
    fed_own_chunk(model, batches(steps_before))
    torch.manual_seed(7)
    new = torch.randn(13, 10)
    old = model.blocks[1].up.weight
    reference.blocks[1].up.weight = nn.Parameter(new.clone())
    model.blocks[1].up.weight = nn.Parameter(distribute_tensor(new, old.device_mesh, old.placements))
    replacement = model.blocks[1].up.weight
    assert_trains_bitwise_as(model, reference, batches(2, seed=3), adamw)
    assert model.blocks[1].up.weight is replacement
    assert old.grad is None


@on_ranks(2)
@pytest.mark.parametrize("what", ["plain", "none", "deleted", "shape", "replicated"])
def test_a_parameter_replaced_by_anything_else_is_refused_by_name(what):
    model = shard_blocks(mlp())
    fed_own_chunk(model, batches(1))
    up = model.blocks[1].up
    if what == "plain":
        up.weight = nn.Parameter(torch.ones(13, 10))
    elif what == "none":
        up.weight = None
    elif what == "deleted":
        del up.weight
    elif what == "shape":
        up.weight = nn.Parameter(distribute_tensor(torch.ones(13, 11), cpu_mesh(), up.weight.placements))
    else:
        up.weight = nn.Parameter(distribute_tensor(torch.ones(13, 10), cpu_mesh()))
    with pytest.raises(ParameterError, match=r"(?s)blocks.1.up.weight was replaced after fully_shard by.*fix:"):
        model(batches(1)[0])


@on_ranks(4)
def test_a_parameter_replaced_while_a_forward_leaves_it_unsharded_is_refused_by_name_or_adopted():
    """Symptom: the next forward ran with the new one, and backward put the old one back."""
    for after, what in itertools.product((None, False, 2), ("plain", "replicated", "alike", "none")):
        reference, model = mlp(), shard_blocks(mlp(), after)
        head, old = model.last, model.last.weight
        for _ in range(2):
            model(batches(1)[0])
        new = torch.full(old.shape, 0.1)
        assert head.weight is not old
        if what == "alike":
            head.weight = nn.Parameter(distribute_tensor(new, old.device_mesh, old.placements))
            reference.last.weight = nn.Parameter(new.clone())
            replacement = head.weight
            assert_trains_bitwise_as(model, reference, batches(2, seed=3), adamw)
            assert head.weight is replacement
        else:
            placed = nn.Parameter(distribute_tensor(new, cpu_mesh()))
            head.weight = {"plain": nn.Parameter(new), "replicated": placed, "none": None}[what]
            with pytest.raises(ParameterError, match=r"(?s)last.weight was replaced after fully_shard by.*fix:"):
                model(batches(1)[0])


@on_ranks(2)
def test_replacing_a_tied_parameter_in_one_place_only_is_refused():
    """Symptom: the new parameter vanished at the next reshard. Cause: the other place still showed the old one, which won."""
    model = fully_shard(transformer(tied=True), mesh=cpu_mesh())
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(ParameterError, match=r"(?s)embedding.weight was replaced.*some of the 2 places.*fix:"):
        model(torch.zeros(2, 5, dtype=torch.long))
    model.embedding.weight = model.head.weight
    model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    assert model.embedding.weight is model.head.weight
    assert model.head.weight.grad is not None


class Scaled(nn.Module):
    """A linear layer that may be given a magnitude later, computed from its weight, as DoRA does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x):
        scale = self.magnitude if hasattr(self, "magnitude") else 1.0
        return self.linear(x) * scale


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:(?s).*registered below FSDPScaled")
def test_a_plain_parameter_computed_from_a_sharded_one_stays_the_users():
    reference = Scaled()
    model = fully_shard(copy.deepcopy(reference), mesh=cpu_mesh())
    reference.magnitude = nn.Parameter(reference.linear.weight.detach().norm(dim=1))
    model.magnitude = nn.Parameter(model.linear.weight.detach().full_tensor().norm(dim=1))
    x = batches(1)[0]
    reference(x).square().mean().backward()
    model(own_chunk(x)).square().mean().backward()
    assert not isinstance(model.magnitude.grad, DTensor)
    dist.all_reduce(model.magnitude.grad)  # what nobody does unasked
    torch.testing.assert_close(model.magnitude.grad / 2, reference.magnitude.grad)
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), reference.linear.weight.grad)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    """LoRA on each block's first linear layer, the rest frozen."""
    model.requires_grad_(False)
    torch.manual_seed(5)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


@on_ranks(2, 3)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_adapters_added_after_sharding_train_once_they_are_sharded_too(steps_before):
    reference, model = mlp(), shard_blocks(mlp())
    fed_in_chunks(reference, batches(steps_before))
    fed_own_chunk(model, batches(steps_before))
    adapt(reference)
    adapt(model)
    for block in model.blocks:
        for layer in (block.up.down, block.up.up):
            fully_shard(layer, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, batches(3, seed=3), adamw)


@on_ranks(2)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_adapters_left_plain_are_warned_of_by_name_with_the_fix(steps_before):
    model = shard_blocks(mlp())
    fed_own_chunk(model, batches(steps_before))
    adapt(model)
    wanted = r"(?s)6 trainable parameters.*blocks.0.up.down.weight \(2, 10\).*drift apart.*fix:.*before fully_shard, call fsdp2.adopt"
    with warned_on_rank_0(UserWarning, wanted):
        model(own_chunk(batches(1)[0])).sum().backward()
    assert not isinstance(model.blocks[0].up.down.weight.grad, DTensor)
    model(batches(1)[0])  # once is enough
    model.extra = nn.Parameter(torch.zeros(2))
    with warned_on_rank_0(UserWarning, r"(?s)7 trainable parameters.*\n  and 2 more"):
        model(batches(1)[0])


@on_ranks(2)
def test_a_parameter_that_is_sharded_already_cannot_be_ignored():
    model = mlp()
    weight, last = model.blocks[0].up.weight, model.last.weight
    fully_shard(model.blocks[0], mesh=cpu_mesh(), ignored_params={last})  # of another part of the model: fine
    with pytest.raises(ArgumentError, match=r"(?s)1 parameters that an earlier.*up.weight \(13, 10\).*fix:"):
        fully_shard(model, mesh=cpu_mesh(), ignored_params={weight, last})
    fully_shard(model, mesh=cpu_mesh(), ignored_params={last})


@on_ranks(2)
def test_nothing_is_warned_of_that_the_user_takes_care_of():
    model = mlp()
    fully_shard(model, mesh=cpu_mesh(), ignored_params={model.last.weight, model.blocks[0].scale})
    copy.deepcopy(model)(batches(1)[0]).sum().backward()
    model.frozen = nn.Linear(3, 3).requires_grad_(False)
    model(batches(1)[0]).sum().backward()


# --- what it is, and what others make of it -----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_sharded_module_is_recognized_by_everybody():
    model = shard_blocks(mlp())
    for kind in (type(mlp()), FSDPModule, upstream.FSDPModule):
        assert isinstance(model, kind)
    assert type(model).__name__ == "FSDPMLP"
    assert isinstance(model.blocks[0], Block)
    assert not isinstance(model.first, FSDPModule)
    unit = model._get_fsdp_state()
    assert fully_shard.state(model) is unit
    assert upstream.fully_shard.state(model) is unit
    assert fully_shard.state(model.first) is None
    assert fully_shard.state(nn.Linear(1, 1)) is None
    assert all(module._is_fsdp_managed_module and module._fsdp_use_orig_params for module in model.modules())


@on_ranks(2)
def test_other_data_parallel_apis_refuse_a_sharded_module_and_the_reverse():
    for apply in (
        lambda module: upstream.fully_shard(module, mesh=cpu_mesh()),
        replicate_by_ddp,
        lambda module: replicate_by_fsdp(module, mesh=cpu_mesh()),
    ):
        with pytest.raises((AssertionError, RuntimeError, ValueError), match=r"already|once"):
            apply(shard_blocks(mlp()))
        theirs = mlp()
        apply(theirs)
        with pytest.raises(ValueError, match=r"already applied"):
            fully_shard(theirs, mesh=cpu_mesh())
        parent = nn.Sequential(theirs, nn.Linear(5, 2))
        fully_shard(parent, mesh=cpu_mesh())  # leaves what another API manages alone, and takes the rest
        taken = [param for group in parent._get_fsdp_state().groups for param in group.params]
        assert sorted(param.fqn for param in taken) == ["1.bias", "1.weight"]


@on_ranks(2)
def test_slices_and_items_of_a_sharded_sequential_are_of_the_plain_class():
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), mesh=cpu_mesh())
    assert type(model[:2]) is nn.Sequential
    assert model[:2][0] is model[0]
    assert type(model[0]) is nn.Linear
    assert len(model) == 3
    model.append(nn.ReLU())
    assert "FSDPSequential" in repr(model)
    model(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_names_and_state_dict_keys_are_those_of_the_unsharded_model():
    for wrapped in (False, True):
        reference, model = mlp(), mlp()
        if wrapped:
            for each in (reference, model):
                apply_activation_checkpointing(each, check_fn=lambda module: isinstance(module, Block))
        shard_blocks(model)
        assert [name for name, _ in model.named_modules()] == [name for name, _ in reference.named_modules()]
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
        assert list(model.state_dict()) == list(reference.state_dict()) == list(mlp().state_dict())


@on_ranks(2, 3)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_loading_a_state_dict_strictly(assign, steps_before):
    reference, model = mlp(seed=4), shard_blocks(mlp())
    fed_own_chunk(model, batches(steps_before))
    new = {
        name: distribute_tensor(tensor.clone(), cpu_mesh(), model.state_dict()[name].placements)
        for name, tensor in reference.state_dict().items()
    }
    result = model.load_state_dict(new, strict=True, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_trains_bitwise_as(model, reference, batches(2, seed=3))
    with pytest.raises(RuntimeError, match=r"Missing key.*first.bias"):
        model.load_state_dict({name: tensor for name, tensor in new.items() if name != "first.bias"})


@on_ranks(2)
def test_training_mode_reaches_every_module_and_changes_no_parameter():
    model = shard_blocks(mlp())
    before = [id(param) for param in model.parameters()]
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())
    assert [id(param) for param in model.parameters()] == before


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        OffloadPolicy(),
        CPUOffloadPolicy(pin_memory=False),
        DataParallelMeshDims(shard=("a", "b"), replicate="c"),
    ],
)
def test_policies_are_values(policy):
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert hash(copy.copy(policy)) == hash(policy)
    with pytest.raises(AttributeError):
        policy.anything = 1


@on_ranks(2)
def test_hooks_of_the_user_can_be_added_and_removed_at_any_time():
    model = shard_blocks(mlp())
    seen = []
    handles = [
        model.blocks[0].register_forward_pre_hook(lambda *_: seen.append("pre")),
        model.blocks[0].register_forward_hook(lambda *_: seen.append("post")),
        model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward")),
        model.first.weight.register_hook(lambda grad: seen.append("never")),  # of the sharded one, which is in no graph
    ]
    expected = fed_in_chunks(mlp(), batches(2))
    steps = fed_own_chunk(model, batches(1))
    assert seen == ["pre", "post", "backward"]
    for handle in handles:
        handle.remove()
    steps += fed_own_chunk(model, batches(2)[1:])
    assert seen == ["pre", "post", "backward"]
    assert_same_tensors(steps[0].grads, expected[0].grads, "gradient")
    before = state_of(model)
    model.zero_grad()
    assert_same_tensors(state_of(model), before, "value")
