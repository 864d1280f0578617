"""Parameters that are all-gathered by extensions of their own train like the unsharded model with the same rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.subclasses import (
    InDtype,
    RoundedTo8,
    RowInt8,
    Wrapper,
    from_rows_of_int8,
    to_rows_of_int8,
    wrap_weights,
)
from harness.training import (
    adamw,
    assert_equal_training,
    assert_same_bits,
    fed_in_chunks,
    fed_own_chunk,
    forward_backward,
    sgd,
)


class Rounded(nn.Module):
    """The oracle: the plain model, run with weights that went through what the extension does to them."""

    def __init__(self, model: nn.Module, rounded=RoundedTo8.apply) -> None:
        super().__init__()
        self.model = model
        self.rounded = rounded

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: self.rounded(p) if p.ndim > 1 else p for name, p in self.model.named_parameters()}
        return functional_call(self.model, weights, (x,))

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters(*args, **kwargs)


def shard(model: nn.Module, each_block: bool = True, **options) -> nn.Module:
    if each_block:
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh(), **options)
    return fully_shard(model, mesh=cpu_mesh(), **options)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("dim", "optimizer"), [(4, sgd), (9, adamw), (10, sgd), (12, adamw)])
def test_training_with_rounded_all_gathers_equals_the_unsharded_model(dim, optimizer):
    reference = mlp(dim)
    model = shard(wrap_weights(copy.deepcopy(reference), RowInt8))
    steps = fed_own_chunk(model, batches(), optimizer)
    for step in steps:
        for name, param in step.params.items():
            assert isinstance(param, DTensor)
            assert type(param._local_tensor) is (RowInt8 if param.ndim > 1 else Tensor), name
            step.params[name] = plain(param)
    assert_same_bits(steps, fed_in_chunks(Rounded(copy.deepcopy(reference)), batches(), optimizer))


def plain(param: DTensor) -> DTensor:
    local = param._local_tensor
    return DTensor.from_local(
        local._values if isinstance(local, Wrapper) else local,
        param.device_mesh,
        param.placements,
        shape=param.shape,
        stride=param.stride(),
    )


def bf16_and_back(values: Tensor) -> Tensor:
    return values + (values.to(torch.bfloat16).to(values.dtype) - values).detach()


def check(kind, rounded, dim: int = 9, optimizer=sgd, iteration=forward_backward, **options) -> nn.Module:
    """Bit for bit the unsharded model with the same rounding."""
    reference = mlp(dim)
    model = shard(wrap_weights(copy.deepcopy(reference), kind), **options)
    steps = fed_own_chunk(model, batches(), optimizer, iteration)
    for step in steps:
        step.params.update({name: plain(param) for name, param in step.params.items()})
    expected = fed_in_chunks(Rounded(reference, rounded), batches(), optimizer, iteration)
    if "mp_policy" in options or "mesh" in options:
        assert_equal_training(steps, expected)
    else:
        assert_same_bits(steps, expected)
    return model


OPTIONS = {
    "kept after forward": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "reduced in fp64": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
}


@on_ranks(2, 3)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [RowInt8, InDtype])
def test_every_option_holds_for_parameters_with_extensions(kind, options):
    check(kind, {RowInt8: RoundedTo8.apply, InDtype: bf16_and_back}[kind], **OPTIONS[options])


@on_ranks(2, 3)
def test_a_subclass_without_extension_travels_as_its_values():
    check(Wrapper, lambda values: values)


@on_ranks(1, 3)
@pytest.mark.parametrize("columns", [9, 12])
def test_a_cut_along_the_columns(columns):
    options = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    model = check(InDtype, bf16_and_back, columns, **options)
    assert model.first.weight.placements == (Shard(1),)


@on_ranks(2)
def test_gathered_weights_are_in_param_dtype_and_gradients_in_fp32():
    model = shard(wrap_weights(mlp(), RowInt8), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.unshard()
    assert type(model.first.weight) is nn.Parameter
    assert model.first.weight.dtype == torch.bfloat16
    model(batches()[0]).square().mean().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@on_ranks(4)
@pytest.mark.parametrize("kind", [RowInt8, InDtype])
def test_hybrid_sharding(kind):
    reference = mlp(9)
    model = wrap_weights(copy.deepcopy(reference), kind)
    shard_blocks(model, mesh=cpu_mesh(2, 2))
    steps = fed_own_chunk(model, batches())
    for step in steps:
        step.params.update({name: plain(param) for name, param in step.params.items()})
    rounded = Rounded(reference, {RowInt8: RoundedTo8.apply, InDtype: bf16_and_back}[kind])
    assert_equal_training(steps, fed_in_chunks(rounded, batches()))


@on_ranks(4)
def test_resharding_to_fewer_ranks_after_forward_reshards_to_all():
    check(RowInt8, RoundedTo8.apply, reshard_after_forward=2)


@on_ranks(2)
def test_frozen_weights_beside_trained_biases():
    reference = mlp(9)
    for param in reference.parameters():
        param.requires_grad_(param.ndim == 1)
    model = shard(wrap_weights(copy.deepcopy(reference), RowInt8))
    steps = fed_own_chunk(model, batches())
    for step in steps:
        step.params.update({name: plain(param) for name, param in step.params.items()})
        assert [name for name, grad in step.grads.items() if grad is None] == [n for n in step.grads if model.get_parameter(n).ndim > 1]
    assert_same_bits(steps, fed_in_chunks(Rounded(reference), batches()))


def accumulating(model: nn.Module, x: Tensor) -> Tensor:
    sharded = hasattr(model, "set_requires_gradient_sync")
    for index, chunk in enumerate(x.chunk(2)):
        if sharded:
            model.set_requires_gradient_sync(index == 1)
        loss = model(chunk).square().mean()
        loss.backward()
    return loss


@on_ranks(2, 3)
def test_gradients_accumulate_without_communication():
    reference = mlp(9)
    model = shard(wrap_weights(copy.deepcopy(reference), RowInt8))
    steps = fed_own_chunk(model, batches(), iteration=accumulating)
    for step in steps:
        step.params.update({name: plain(param) for name, param in step.params.items()})
    assert_equal_training(steps, fed_in_chunks(Rounded(reference), batches(), iteration=accumulating))


@on_ranks(4)
def test_beside_tensor_parallelism():
    """The subclass is the local tensor of a DTensor, as when parallelize_module comes before fully_shard."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    model, reference = with_reference(nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5)))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for name, param in model.named_parameters():
        if param.ndim > 1:
            local = DTensor(RowInt8(param._local_tensor.detach()), param._spec, requires_grad=False)
            model.get_submodule(name[0]).weight = nn.Parameter(local)
    fully_shard(model, mesh=mesh["dp"])
    own = batches()[0].chunk(2)[mesh["dp"].get_local_rank()]
    for _ in range(2):
        model(own).square().mean().backward()
    grads = {name: param.grad.full_tensor() / 2 for name, param in model.named_parameters()}
    assert type(model[0].weight._local_tensor) is RowInt8
    weights = {name: p.detach() for name, p in reference.named_parameters()}
    first = from_rows_of_int8(*to_rows_of_int8(weights["0.weight"]), torch.float32)
    second = torch.cat([from_rows_of_int8(*to_rows_of_int8(half), torch.float32) for half in weights["2.weight"].chunk(2, 1)], 1)
    weights = {name: w.requires_grad_() for name, w in (weights | {"0.weight": first, "2.weight": second}).items()}
    for chunk in batches()[0].chunk(2):
        (functional_call(reference, weights, (chunk,)).square().mean() / 2).backward()
    for name, weight in weights.items():
        torch.testing.assert_close(grads[name], weight.grad, msg=lambda text, name=name: f"{name}: {text}")
