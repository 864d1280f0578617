"""Methods of FSDPModule that change a training run: which change numbers, which change communication only, which do nothing here."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard, parallelize, user_warnings
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_equal_grads,
    assert_trains_as,
    assert_trains_bitwise_as,
    forward_backward,
    grads_of,
    micro_batches,
    own_chunk,
)
from harness.user_warnings import warned_on_rank_0


def every(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole_gradients(reference: nn.Module, x: Tensor, divide_by: float) -> dict[str, Tensor]:
    for chunk in x.chunk(dist.get_world_size()):
        reference(chunk).square().mean().div(divide_by).backward()
    return grads_of(reference)


# --- when gradients are reduced -----------------------------------------------------------------------------------------------------

PATTERNS = {  # the number of micro-batches, those that sync, and those that the model is told are the last
    "sync at the end": (3, [2], [2]),
    "sync in between": (3, [1, 2], [2]),
    "sync always": (3, [0, 1, 2], [2]),
    "last is not told": (4, [1, 3], [0, 1, 2, 3]),
}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_sync_and_last_backward(pattern):
    model, reference = with_reference(mlp(), shard_blocks)
    number, syncs, lasts = PATTERNS[pattern]
    iteration = micro_batches(number, set_requires_gradient_sync=syncs, set_is_last_backward=lasts)
    inputs = batches(2, shape=(36, 7))
    assert_trains_as(model, reference, inputs, iteration=iteration)


@on_ranks(2, 3)
def test_modules_that_do_not_sync_while_others_do():
    model, reference = with_reference(mlp(), shard_blocks)

    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        losses = []
        for index, part in enumerate(x.chunk(3)):
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(index == 2)
                model.set_requires_gradient_sync(index == 2, recurse=False)
                for number, block in enumerate(model.blocks):
                    block.set_requires_gradient_sync(index == 2 or (number + index) % 2 == 0)
            losses.append(forward_backward(model, part))
        return torch.stack(losses).mean()

    inputs = batches(2, shape=(36, 7))
    assert_trains_as(model, reference, inputs, iteration=iteration)


# --- how they are reduced -------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_setters_that_change_communication_only():
    model, reference = with_reference(mlp(num_blocks=4), shard_blocks)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    for module in every(model):
        module.set_force_sum_reduction_for_comms(True)
    assert_trains_bitwise_as(model, reference, batches(2))
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_separate_reduce_scatter_group(False)
    for module in every(model):
        module.set_force_sum_reduction_for_comms(False)
    assert_trains_bitwise_as(model, reference, batches(2, seed=2))


@on_ranks(2)
def test_as_many_reductions_are_in_flight_as_asked_for():
    from fsdp2.core.iteration.reductions import Reductions

    model = shard_blocks(mlp(num_blocks=4))
    most = 0
    start = Reductions.start

    def counted(self, *args, **kwargs):
        nonlocal most
        start(self, *args, **kwargs)
        most = max(most, len(self._holding))

    with mock.patch.object(Reductions, "start", counted):
        for number in (1, 2, 3):
            most = 0
            model.blocks[0].set_reduce_scatter_max_input_buffers(number)  # one list for all: the most generous counts
            forward_backward(model, own_chunk(batches()[0]))
            assert most == number


@on_ranks(2)
def test_several_input_buffers_in_symmetric_memory_are_refused_before_the_first_forward():
    from fsdp2.communicators import OwnReduceScatter

    model = shard_blocks(mlp())
    (group,) = model.blocks[1]._get_fsdp_state().groups
    comm = object.__new__(OwnReduceScatter)  # what set_symm_mem_for_comm makes where there is NCCL
    comm.symmetric = "NCCL"
    group.gradients.choose(comm=comm)
    model.set_reduce_scatter_max_input_buffers(2)
    with pytest.raises(ValueError, match=r"blocks\.1: 2 input buffers"):
        model(own_chunk(batches()[0]))


@on_ranks(2)
def test_the_separate_group_carries_the_reductions():
    model = shard_blocks(mlp())
    model.set_separate_reduce_scatter_group()
    groups = {group.gradients.options.process_group for module in every(model) for group in module._get_fsdp_state().groups}
    assert len(groups) == 1
    assert cpu_mesh().get_group() not in groups
    model.set_separate_reduce_scatter_group()
    assert {group.gradients.options.process_group for module in every(model) for group in module._get_fsdp_state().groups} == groups


@on_ranks(2, timeout=30)
def test_ranks_may_have_made_different_numbers_of_process_groups():
    """Symptom: a hang, in torch too: each rank waited for the others under another name."""
    model, reference = shard_blocks(mlp()), mlp()
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    model.set_separate_reduce_scatter_group()
    assert_trains_bitwise_as(model, reference, batches(1))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("sum_only", [True, False])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_set_gradient_divide_factor(sum_only, reduce_dtype):
    """Upstream asks gloo for PREMUL_SUM, which it does not have."""
    model, reference = with_reference(mlp(), shard_blocks, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    for module in every(model):
        module.set_gradient_divide_factor(5.0)
        module.set_force_sum_reduction_for_comms(sum_only)
    forward_backward(model, own_chunk(batches()[0]))
    assert_equal_grads(grads_of(model), whole_gradients(reference, batches()[0], 5.0))


@on_ranks(4)
def test_set_gradient_divide_factor_with_replication():
    model, reference = with_reference(mlp(), shard_blocks, mesh=cpu_mesh(2, 2))
    for module in every(model):
        module.set_gradient_divide_factor(3.0)
    forward_backward(model, own_chunk(batches()[0]))
    assert_equal_grads(grads_of(model), whole_gradients(reference, batches()[0], 3.0))


@on_ranks(2)
def test_a_divide_factor_of_none_is_the_default_again_as_under_torchs_fsdp2():
    model, reference = with_reference(mlp(), shard_blocks)
    for factor in (3.0, None):
        for module in every(model):
            module.set_gradient_divide_factor(factor)
    assert_trains_bitwise_as(model, reference, batches(1))


@on_ranks(2)
@pytest.mark.parametrize("apply", [fully_shard, parallelize])
def test_no_offload_policy_is_that_of_the_default_as_under_torchs_fsdp2(apply):
    model, reference = with_reference(mlp())
    apply(model, mesh=cpu_mesh(), offload_policy=None)
    assert_trains_bitwise_as(model, reference, batches(1))


@on_ranks(2)
def test_the_old_name_of_the_divide_factor_warns():
    model = shard_blocks(mlp())
    with warned_on_rank_0(FutureWarning, "set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(2.0)


@on_ranks(1, 2, 3)
def test_an_all_reduce_hook_on_one_axis_changes_the_gradient_before_it_is_seen():
    model, reference = with_reference(mlp(), shard_blocks)
    seen = []

    def hook(reduced: Tensor) -> None:
        seen.append(reduced.shape)
        reduced.mul_(2.0)

    for module in every(model):
        module.set_all_reduce_hook(hook)
    order = []
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda param: order.append(param.grad.to_local().clone()))
    forward_backward(model, own_chunk(batches()[0]))
    assert_equal_grads(grads_of(model), whole_gradients(reference, batches()[0], dist.get_world_size() / 2))
    assert len(seen) == 4
    assert all(len(shape) == 1 for shape in seen)
    assert torch.equal(order[0], model.blocks[0].up.weight.grad.to_local())


@on_ranks(4)
def test_an_all_reduce_hook_may_be_a_users_own_replication():
    """1-D sharding over two ranks, and a hook that averages over the other two: HSDP by hand."""
    mesh = cpu_mesh(2, 2)
    model, reference = with_reference(mlp(), shard_blocks, mesh=mesh["shard"])
    for module in every(model):
        module.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced, op=dist.ReduceOp.AVG, group=mesh["replicate"].get_group()))
    forward_backward(model, own_chunk(batches()[0]))
    whole = whole_gradients(reference, batches()[0], 4.0)
    assert_equal_grads(grads_of(model), whole)


# --- when parameters are gathered ---------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_an_embedding_is_not_gathered_in_backward_if_it_need_not_be():
    from fsdp2.core.group.all_gather import Gather

    model, reference = with_reference(transformer())
    fully_shard(model.embedding, mesh=cpu_mesh())
    shard_blocks(model)
    model.embedding.set_unshard_in_backward(False)
    assert_trains_bitwise_as(model, reference, token_batches(2))
    starts = []
    start = Gather.start
    with mock.patch.object(Gather, "start", lambda self, *args: (starts.append(self), start(self, *args))[1]):
        forward_backward(model, own_chunk(token_batches(1)[0]))
    ours = model.embedding._get_fsdp_state().groups[0].unsharded.gather
    assert starts.count(ours) == 1
    assert starts.count(model.blocks[0]._get_fsdp_state().groups[0].unsharded.gather) == 2


# --- what a device cannot do ----------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_a_setter_without_effect_says_so_once():
    model = shard_blocks(mlp())
    setters = {
        "set_post_optim_event": lambda module: module.set_post_optim_event(torch.Event("cpu") if False else mock.Mock()),
        "set_allocate_memory_from_process_group_for_comm": lambda module: module.set_allocate_memory_from_process_group_for_comm(True),
        "set_symm_mem_for_comm": lambda module: module.set_symm_mem_for_comm(),
    }
    with mock.patch.object(user_warnings, "_told", set()):
        for name, call in setters.items():
            with warned_on_rank_0(UserWarning, name):
                call(model)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                call(model)
                call(model.blocks[0])
    reference = mlp()
    assert_trains_bitwise_as(model, reference, batches(2))


@on_ranks(2)
def test_a_profile_shows_what_each_module_gathers_and_reduces():
    model = shard_blocks(mlp())
    x = own_chunk(batches()[0])
    forward_backward(model, x)
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 and 2.12 warn where nobody chose
        forward_backward(model, x)
    names = {event.key for event in profile.key_averages()}
    modules = ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert {f"FSDP::{what} ({module})" for what in ("all_gather", "reduce") for module in modules} <= names
