"""What a training loop does with gradients between backward and step: clipping, loss scaling, stepping inside of backward."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import (
    adamw,
    assert_equal_grads,
    assert_same_tensors,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    grads_of,
    own_chunk,
    sgd,
    state_of,
)


def with_gradients(mesh=None, without_empty_shards=False):
    """The reference and the sharded model after a backward."""
    reference = mlp()
    if without_empty_shards:
        for block in reference.blocks:
            block.scale = nn.Parameter(torch.full((10,), 0.5))
    model = shard_blocks(copy.deepcopy(reference), mesh=mesh)
    x = batches(1)[0]
    reference(x).square().mean().backward()
    model(own_chunk(x)).square().mean().backward()
    return reference, model


# --- clipping -----------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 0.5, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_norm(norm_type, foreach):
    check_clipping(cpu_mesh(), norm_type, foreach)


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 0.5, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_norm_on_replicas_of_shards(norm_type, foreach):
    check_clipping(cpu_mesh(2, 2), norm_type, foreach)


def check_clipping(mesh, norm_type, foreach):
    # torch refuses the infinity norm of no elements, on the ranks that have none of a parameter.
    reference, model = with_gradients(mesh, without_empty_shards=norm_type == float("inf"))
    expected = clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    norm = clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)
    assert isinstance(norm, DTensor)
    torch.testing.assert_close(norm.full_tensor(), expected)
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=32)


@on_ranks(2)
@pytest.mark.parametrize("foreach", [True, False])
def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(foreach):
    _, model = with_gradients()
    if dist.get_rank() == 1:
        model.last.weight.grad.to_local()[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach)


@on_ranks(3)
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_value(foreach):
    reference, model = with_gradients()
    largest = max(param.grad.abs().max().item() for param in reference.parameters())
    clip_grad_value_(reference.parameters(), largest / 4)
    clip_grad_value_(model.parameters(), largest / 4, foreach=foreach)
    assert_equal_grads(grads_of(model), grads_of(reference), ulps=64)


# --- loss scaling -------------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("foreach", [True, False])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(foreach, world_size):
    mesh = cpu_mesh(2, 2) if world_size == 4 else cpu_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    model = shard_blocks(mlp(), mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, is_finite in enumerate([True, False, True]):
        x = own_chunk(batches(1, seed=step)[0])
        before = state_of(model)
        scale = scaler.get_scale()
        scaler.scale(model(x).float().square().mean()).backward()
        if not is_finite and mesh["shard"].get_local_rank() == 1:
            model.blocks[1].up.weight.grad.to_local()[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if is_finite:
            assert scaler.get_scale() == scale
            assert not torch.equal(model.first.weight.to_local(), before["first.weight"].to_local())
        else:
            assert scaler.get_scale() == scale / 2
            assert_same_tensors(state_of(model), before, "value")


@on_ranks(2)
def test_a_scaled_loss_trains_like_the_unsharded_model_under_the_same_scale():
    reference, model = mlp(), shard_blocks(mlp())
    optimizers = [adamw(each.parameters()) for each in (reference, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in optimizers]
    for x in batches(4):
        for each, optimizer, scaler, data in zip((reference, model), optimizers, scalers, (x, own_chunk(x)), strict=True):
            scaler.scale(each(data).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**12
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), reference.get_parameter(name), atol=1e-6, rtol=1e-6)


# --- the optimizer inside of backward -----------------------------------------------------------------------------------------


def step_in_backward(model, make_optimizer):
    optimizers = {param: make_optimizer([param]) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in model.parameters()]


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_each_parameter_is_stepped_as_soon_as_its_gradient_is_there(after, make_optimizer):
    check_step_in_backward(cpu_mesh(), after, make_optimizer, assert_same_tensors)


@on_ranks(4)
@pytest.mark.parametrize("after", [None, 2])
def test_stepping_in_backward_on_replicas_and_on_fewer_ranks(after):
    mesh = cpu_mesh(2, 2) if after is None else cpu_mesh()

    def close(actual, expected, what):
        for name, tensor in actual.items():
            torch.testing.assert_close(tensor.full_tensor(), expected[name], msg=what)

    check_step_in_backward(mesh, after, sgd, close)


def check_step_in_backward(mesh, after, make_optimizer, compare):
    reference, model = mlp(), shard_blocks(mlp(), mesh=mesh, reshard_after_forward=after)
    steps = fed_in_chunks(reference, batches(3), make_optimizer)
    handles = step_in_backward(model, make_optimizer)
    for step, x in enumerate(batches(3)):
        model(own_chunk(x)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        compare(state_of(model), steps[step].params, f"step {step}: value")
    for handle in handles:
        handle.remove()
    before = state_of(model)
    model(own_chunk(x)).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert_same_tensors(state_of(model), before, "value")


@on_ranks(2)
def test_gradients_of_earlier_units_are_freed_before_later_ones_exist():
    model = shard_blocks(mlp())
    model_params, most = list(model.parameters()), []

    def free(param):
        most.append(sum(each.grad is not None for each in model_params))
        param.grad = None

    for param in model_params:
        param.register_post_accumulate_grad_hook(free)
    model(own_chunk(batches(1)[0])).sum().backward()
    assert len(most) == len(model_params)
    assert max(most) == 1


# --- other data-parallel oracles ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_training_equals_ddp():
    model, ddp = shard_blocks(mlp()), nn.parallel.DistributedDataParallel(mlp())
    ours, theirs = fed_own_chunk(model, batches(3), adamw), fed_own_chunk(ddp, batches(3), adamw)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.loss, wanted.loss, atol=1e-6, rtol=1e-6)
        for name, param in mine.params.items():
            torch.testing.assert_close(param.full_tensor(), wanted.params[f"module.{name}"], atol=1e-6, rtol=1e-6)


@on_ranks(2)
def test_stochastic_layers_in_training_and_in_evaluation():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for train in (True, False, True):
        for each in (model, reference):
            each.train(train)
            torch.manual_seed(1)
            each(x).square().sum().backward()
        assert [module.training for module in model.modules()] == [train] * 5
    assert_equal_grads(grads_of(model), grads_of(reference))
    assert_same_tensors(dict(model.named_buffers()), dict(reference.named_buffers()), "buffer")


@on_ranks(2)
def test_the_same_bits_with_gradients_set_to_zero_instead_of_none():
    reference, model = mlp(), shard_blocks(mlp())
    for x in batches(2):
        for each in (reference, model):
            each.zero_grad(set_to_none=False)
        assert_trains_bitwise_as(model, reference, [x])
