"""In which dtype gradients are reduced and kept: by torch 2.13's rules, and by those of 2.15, which asks ``param.grad_dtype``.

The tables hold with every torch, for ``set_semantics`` chooses the rules; torch's own FSDP2 runs beside ours where it has the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp2
from fsdp2 import ArgumentError, MixedPrecisionPolicy, fully_shard
from fsdp2.semantics import chosen_semantics
from harness import cpu_mesh, needs_torch, on_ranks
from harness.sharding import with_reference
from harness.training import assert_equal_grads, grads_of

BF16, FP32 = torch.bfloat16, torch.float32
UNSET: Any = "unset"


@contextlib.contextmanager
def semantics(version: str) -> Iterator[None]:
    fsdp2.set_semantics(version)
    try:
        yield
    finally:
        fsdp2.set_semantics("torch")


def build(
    package: Any, dtype: torch.dtype, policy: dict[str, Any], grad_dtype: Any, only_weight: bool = False, **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    for name, param in model.named_parameters():
        if grad_dtype is not UNSET and (not only_weight or name == "0.weight"):
            param.grad_dtype = grad_dtype
    for layer in model:
        package.fully_shard(layer, mesh=cpu_mesh(), mp_policy=package.MixedPrecisionPolicy(**policy))
    package.fully_shard(model, mesh=cpu_mesh(), mp_policy=package.MixedPrecisionPolicy(**policy))
    return model


def reduced_in(model: nn.Module) -> list[torch.dtype]:
    """A list that each reduction enters its dtype into."""
    seen: list[torch.dtype] = []
    for layer in model:
        layer.set_all_reduce_hook(lambda reduced: seen.append(reduced.dtype))
    return seen


def train(model: nn.Module, micro_batches: int = 1) -> None:
    for index in range(micro_batches):
        model.set_requires_gradient_sync(index == micro_batches - 1)
        torch.manual_seed(index)
        model(torch.randn(2, 4).to(next(model.parameters()).dtype)).float().sum().backward()


CASES: dict[str, tuple[torch.dtype, dict[str, Any], Any, dict[str, tuple[torch.dtype, torch.dtype]]]] = {
    # name: dtype of the parameters, policy, grad_dtype, by version: (reduced in, of the gradients)
    "bf16": (BF16, {}, UNSET, {"2.13": (BF16, BF16), "2.15": (BF16, BF16)}),
    "fp32, computed in bf16": (FP32, {"param_dtype": BF16}, UNSET, {"2.13": (BF16, FP32), "2.15": (FP32, FP32)}),
    "fp32, reduced in bf16": (FP32, {"param_dtype": BF16, "reduce_dtype": BF16}, UNSET, {"2.13": (BF16, FP32), "2.15": (BF16, FP32)}),
    "bf16, grad_dtype fp32": (BF16, {}, FP32, {"2.13": (BF16, BF16), "2.15": (FP32, FP32)}),
    "bf16, grad_dtype None": (BF16, {}, None, {"2.13": (BF16, BF16), "2.15": (BF16, BF16)}),
    "computed in bf16, grad_dtype bf16": (FP32, {"param_dtype": BF16}, BF16, {"2.13": (BF16, FP32), "2.15": (BF16, BF16)}),
    "computed in bf16, grad_dtype None": (FP32, {"param_dtype": BF16}, None, {"2.13": (BF16, FP32), "2.15": (BF16, BF16)}),
    "bf16, reduced in fp32": (BF16, {"reduce_dtype": FP32}, UNSET, {"2.13": (FP32, BF16), "2.15": (FP32, BF16)}),
    "bf16, reduced in fp32, grad_dtype fp32": (BF16, {"reduce_dtype": FP32}, FP32, {"2.13": (FP32, BF16), "2.15": (FP32, FP32)}),
    "bf16, reduced in fp32, grad_dtype None": (BF16, {"reduce_dtype": FP32}, None, {"2.13": (FP32, BF16), "2.15": (FP32, FP32)}),
}


@on_ranks(2)
@pytest.mark.parametrize("version", ["2.13", "2.15"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_travel_and_stay_in_the_dtypes_of_that_version(case, version):
    dtype, policy, grad_dtype, expected = CASES[case]
    with semantics(version):
        model = build(fsdp2, dtype, policy, grad_dtype)
    seen = reduced_in(model)
    train(model)
    assert (set(seen), {param.grad.dtype for param in model.parameters()}) == ({expected[version][0]}, {expected[version][1]})


@on_ranks(2)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_torch_bit_by_bit(case, micro_batches):
    """Two ranks add up two numbers, in whatever order."""
    dtype, policy, grad_dtype, _ = CASES[case]
    ours, theirs = (build(package, dtype, policy, grad_dtype) for package in (fsdp2, torch_fsdp))
    for model in (ours, theirs):
        train(model, micro_batches)
    for (name, own), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad.dtype is their.grad.dtype, name
        assert torch.equal(own.grad.to_local(), their.grad.to_local()), name


@on_ranks(2)
def test_one_parameter_with_a_grad_dtype_has_its_group_reduced_wider_and_its_gradient_alone_kept_so():
    with semantics("2.15"):
        model = build(fsdp2, BF16, {}, FP32, only_weight=True)
    seen = reduced_in(model)
    train(model)
    assert sorted(seen, key=str) == [BF16, FP32]
    assert [param.grad.dtype for param in model.parameters()] == [FP32, BF16, BF16, BF16]
    assert [param.grad_dtype for param in model.parameters()] == [FP32, BF16, BF16, BF16]


@on_ranks(2)
def test_grad_dtype_may_be_set_on_sharded_parameters_before_the_first_unshard():
    with semantics("2.15"):
        model = build(fsdp2, BF16, {}, UNSET)
    for param in model.parameters():
        param.grad_dtype = FP32
    seen = reduced_in(model)
    train(model)
    assert set(seen) == {param.grad.dtype for param in model.parameters()} == {FP32}


@on_ranks(2)
def test_grad_dtype_stays_with_what_takes_a_parameters_place():
    with semantics("2.15"):
        model = build(fsdp2, BF16, {}, FP32)
        train(model)
        model.double()
        assert {(param.dtype, param.grad_dtype, param.grad.dtype) for param in model.parameters()} == {(torch.float64, FP32, FP32)}
        train(model)
        assert {param.grad.dtype for param in model.parameters()} == {FP32}
        assert {param.grad_dtype for param in copy.deepcopy(model).parameters()} == {FP32}
        for param in model.parameters():
            param.grad = None
            param.grad_dtype = None
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
        assert {param.grad_dtype for param in model.parameters()} == {None}
        model.unshard()
        assert {param.grad_dtype for param in model.parameters()} == {None}


@on_ranks(2)
def test_zeros_for_unused_parameters_need_a_dtype():
    with semantics("2.15"):
        model = build(fsdp2, BF16, {}, None)
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ArgumentError, match="grad_dtype=None"):
        train(model)


@on_ranks(2)
@pytest.mark.parametrize(("version", "expected"), [("2.13", 2.015625), ("2.15", 2.0)])
def test_a_narrow_reduction_rounds_each_micro_batch_or_the_sum_with_the_later_ones(version, expected):
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    with semantics(version):
        fully_shard(weight, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    for sync, value in ((False, 1 + 1 / 256 + 1 / 1024), (True, 1 + 1 / 256)):
        weight.set_requires_gradient_sync(sync)
        weight(torch.full((1, 1), value)).sum().backward()
    assert weight.weight.grad.full_tensor().item() == expected


@on_ranks(1, 2)
def test_unsynced_gradients_stay_on_the_unsharded_parameters_and_survive_what_reshards_them():
    model, reference = with_reference(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    with semantics("2.15"):
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=cpu_mesh())
    model.set_reshard_after_backward(False)
    inputs = torch.randn(4, 5, 3).unbind()
    for index, x in enumerate(inputs):
        model.set_requires_gradient_sync(index == 3)
        model(x).sum().backward()
        reference(x).sum().backward()
        if index == 1:
            kept = {name: param.grad for name, param in model.named_parameters()}
            assert_equal_grads(kept, grads_of(reference))
            model.set_reshard_after_backward(True)
    assert_equal_grads(grads_of(model), grads_of(reference))


def backward_by_hand(loss: torch.Tensor, weight: nn.Parameter) -> None:
    """As pipeline schedules write the gradients of weights that they differentiate apart from inputs."""
    (gradient,) = torch.autograd.grad(loss, [weight])
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


@on_ranks(2)
@pytest.mark.parametrize("order", ["hhhh", "hbhb", "bbhh"])
@pytest.mark.parametrize("name", ["ours", pytest.param("torch", marks=needs_torch("2.15", "finalize_backward"))])
def test_gradients_written_by_hand_without_sync_add_up_in_the_same_dtype_as_those_of_backwards(name, order):
    """Symptom: zero-bubble schedules lost bits, for the gradients of weights before the first whole backward added up in bf16."""
    package = {"ours": fsdp2, "torch": torch_fsdp}[name]
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    whole = copy.deepcopy(model).bfloat16()
    with semantics("2.15"):
        package.fully_shard(
            model, mesh=cpu_mesh(), mp_policy=package.MixedPrecisionPolicy(param_dtype=BF16), reshard_after_forward=False
        )
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(4, 4, 16).unbind()
    expected = torch.zeros(16, 16)
    for x in inputs:
        expected += torch.autograd.grad(whole(x.bfloat16()).float().square().mean(), [whole.weight])[0]
    dist.all_reduce(expected)
    model.set_manual_backward_finalization(True)
    losses = [model(x).float().square().mean() for x in inputs]
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for loss, kind in zip(losses, order, strict=True):
        if kind == "h":
            backward_by_hand(loss, model.weight)
        else:
            loss.backward()
        assert model.weight.grad.dtype is FP32
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.finalize_backward()
    assert torch.equal(model.weight.grad.full_tensor(), expected / 2)


@on_ranks(2)
@pytest.mark.parametrize("drop", ["zero_grad", "reset_iter_state"])
def test_unsynced_gradients_are_dropped(drop):
    with semantics("2.15"):
        model = build(fsdp2, FP32, {}, UNSET)
    once = copy.deepcopy(model)
    train(once)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    getattr(model, drop)()
    train(model)
    assert_equal_grads(grads_of(model), grads_of(once))


@on_ranks(2)
@pytest.mark.parametrize(("version", "cleared"), [("2.13", False), ("2.15", True)])
def test_reset_iter_state_drops_finished_gradients_too_from_2_15_on(version, cleared):
    with semantics(version):
        model = build(fsdp2, FP32, {}, UNSET)
    train(model)
    model.reset_iter_state()
    assert all((param.grad is None) is cleared for param in model.parameters())


def test_the_installed_torch_decides_unless_the_user_does():
    assert chosen_semantics() == ("2.15" if torch.__version__ >= "2.15" else "2.13")
    with semantics("2.13"):
        assert chosen_semantics() == "2.13"
    with pytest.raises(ArgumentError, match=r"2\.14"):
        fsdp2.set_semantics("2.14")


@on_ranks(2)
def test_a_unit_keeps_the_semantics_that_it_was_made_with():
    with semantics("2.13"):
        model = build(fsdp2, FP32, {"param_dtype": BF16}, UNSET)
    with semantics("2.15"):
        seen = reduced_in(model)
        train(copy.deepcopy(model))
        train(model)
    assert set(seen) == {BF16}


# --- a dtype for each parameter -----------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [self.norm.weight.dtype, self.linear.weight.dtype, x.dtype]
        return self.linear(self.norm(x.to(self.norm.weight.dtype)).to(self.linear.weight.dtype))


def keep_norms(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.ndim == 1 and param.shape == (4,) and not hasattr(param, "is_bias") else None


def normed() -> Normed:
    torch.manual_seed(0)
    model = Normed()
    model.linear.bias.is_bias = True
    return model


@on_ranks(2)
@pytest.mark.parametrize("name", ["ours", pytest.param("torch", marks=needs_torch("2.15", "param_dtype_override_fn"))])
def test_each_parameter_computes_in_the_dtype_that_the_function_says(name):
    package = {"ours": fsdp2, "torch": torch_fsdp}[name]
    model = normed()
    seen: list[nn.Parameter] = []

    def asked(param: nn.Parameter) -> torch.dtype | None:
        seen.append(param)
        return keep_norms(param)

    policy = package.MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=asked)
    expected = [(id(param), FP32) for param in model.parameters()]
    package.fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    assert [(id(param), param.dtype) for param in seen] == expected
    model(torch.ones(2, 4)).float().sum().backward()
    assert model.dtypes == [FP32, BF16, BF16]
    assert {param.grad.dtype for param in model.parameters()} == {FP32}


@on_ranks(2)
@needs_torch("2.15", "param_dtype_override_fn")
@pytest.mark.parametrize("reduce_dtype", [None, FP32])
def test_gradients_with_a_dtype_for_each_parameter_are_those_of_torch(reduce_dtype):
    models = []
    for package in (fsdp2, torch_fsdp):
        models.append(normed())
        policy = package.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype, param_dtype_override_fn=keep_norms)
        package.fully_shard(models[-1], mesh=cpu_mesh(), mp_policy=policy)
        torch.manual_seed(3)
        models[-1](torch.randn(5, 4)).float().square().sum().backward()
    for own, their in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(own.grad.to_local(), their.grad.to_local())


@pytest.mark.parametrize("answer", [torch.float16, "fp32"])
@on_ranks(1)
def test_another_dtype_than_the_two_is_refused_by_name(answer):
    for package in (fsdp2, torch_fsdp)[: 2 if torch.__version__ >= "2.15" else 1]:
        policy = package.MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=lambda param: answer)
        with pytest.raises(ValueError, match="param_dtype_override_fn"):
            package.fully_shard(nn.Linear(2, 2), mesh=cpu_mesh(), mp_policy=policy)
