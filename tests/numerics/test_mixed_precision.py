"""Mixed precision on any number of ranks, against the unsharded model with its parameters cast by hand.

The oracle casts fp32 parameters to ``param_dtype``, runs each rank's rows, casts the gradients to ``reduce_dtype``, adds them in
rank order, divides, and casts the result to fp32: what the policy promises, in ten lines.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard, set_semantics
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    Step,
    adamw,
    assert_same_bits,
    fed_own_chunk,
    forced,
    forward_backward,
    grads_of,
    micro_batches,
    own_chunk,
    state_of,
)

BF16 = torch.bfloat16


def cast_by_hand(
    model: nn.Module, inputs: list[Tensor], param_dtype: torch.dtype, reduce_dtype: torch.dtype, num_micro_batches: int = 1
) -> list[Step]:
    optimizer = adamw(model.parameters())
    world_size = dist.get_world_size()
    steps = []
    for x in inputs:
        losses, total = [], {}
        for chunk in x.chunk(world_size):
            own: dict[str, Tensor] = {}
            for micro_batch in chunk.chunk(num_micro_batches):
                low = copy.deepcopy(model).to(param_dtype)
                losses.append(forward_backward(low, micro_batch.to(param_dtype)).detach())
                for name, grad in grads_of(low).items():
                    if grad is not None:
                        own[name] = own[name] + grad.to(reduce_dtype) if name in own else grad.to(reduce_dtype)
            for name, grad in own.items():
                total[name] = total[name] + grad if name in total else grad
        for name, param in model.named_parameters():
            param.grad = (total[name] / world_size).float() if name in total else None
        steps.append(Step(torch.stack(losses).mean(), grads_of(model), {}))
        optimizer.step()
        steps[-1].params.update(state_of(model))
        optimizer.zero_grad()
    return steps


def without_losses(steps: list[Step]) -> list[Step]:
    """The mean of losses in low precision depends on how they are grouped; gradients say it all."""
    return [Step(torch.zeros(()), step.grads, step.params) for step in steps]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("gather", ["direct", "packed", "mixed"])
def test_bf16_parameters_reduced_in_fp32(gather):
    model, reference = with_reference(mlp())
    with forced(gather=gather):
        shard_blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    steps = fed_own_chunk(model, batches(), adamw)
    assert_same_bits(without_losses(steps), without_losses(cast_by_hand(reference, batches(), BF16, torch.float32)))
    assert all(param.dtype == torch.float32 for param in model.parameters())


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("reduce_dtype", [None, BF16])
def test_bf16_parameters_reduced_in_bf16(reduce_dtype, after, world_size):
    model, reference = with_reference(mlp())
    set_semantics("2.13")  # by which None is the dtype that forward computes with
    with forced(reduce_scatter="all_to_all" if after else "exchange"):
        shard_blocks(model, after, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype))
    set_semantics("torch")
    steps = fed_own_chunk(model, batches(), adamw)
    assert_same_bits(without_losses(steps), without_losses(cast_by_hand(reference, batches(), BF16, BF16)))


@on_ranks(1, 2, 4)
def test_fp16_parameters_reduced_in_fp32():
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model, reference = with_reference(mlp(), shard_blocks, mp_policy=policy)
    steps = fed_own_chunk(model, batches(), adamw)
    assert_same_bits(without_losses(steps), without_losses(cast_by_hand(reference, batches(), torch.float16, torch.float32)))


@on_ranks(1, 2, 3, 4)
def test_gradients_accumulate_in_the_reduce_dtype():
    iteration = micro_batches(3, set_requires_gradient_sync=[2])
    model, reference = with_reference(mlp(), shard_blocks, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    inputs = batches(shape=(36, 7))
    steps = fed_own_chunk(model, inputs, adamw, iteration)
    assert_same_bits(without_losses(steps), without_losses(cast_by_hand(reference, inputs, BF16, torch.float32, 3)))


@on_ranks(2)
def test_fp16_gradients_too_large_for_a_plain_sum_survive_the_reduction():
    """Each rank's gradient is 40000, their sum past fp16's 65504: divided before and after the sum, the mean is exact."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    model(torch.full((1, 4), 40000.0)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 40000.0))


@on_ranks(2, 3)
def test_small_and_large_values_of_bf16_travel_unharmed():
    """A flag per parameter travels with the gradients: it must not disturb them, whatever their size."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    for size in (1e-30, 1e30):
        model(torch.full((1, 4), size)).sum().backward()
        expected = torch.full((4, 4), size, dtype=BF16)
        total = sum(expected.clone() for _ in range(dist.get_world_size())) / dist.get_world_size()
        assert torch.equal(model.weight.grad.full_tensor(), total.float())
        model.weight.grad = None


@on_ranks(2, 3)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_on_all(bad):
    """So that every rank's loss scaler takes the same decision."""
    model = mlp()
    shard_blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    loss = model(own_chunk(batches()[0])).square().mean()
    (loss * (bad if dist.get_rank() == 1 else 1.0)).backward()
    for param in model.parameters():
        assert not torch.isfinite(param.grad.full_tensor()).any()


@on_ranks(4)
@pytest.mark.parametrize("after", [True, 2])
def test_mixed_precision_on_two_axes_and_on_fewer_ranks(after):
    model, reference = with_reference(mlp())
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    if after is True:
        shard_blocks(model, mp_policy=policy, mesh=cpu_mesh(2, 2))
    else:
        shard_blocks(model, after, mp_policy=policy)
    steps = fed_own_chunk(model, batches(1), adamw)
    expected = cast_by_hand(reference, batches(1), BF16, torch.float32)
    for name, grad in expected[0].grads.items():
        torch.testing.assert_close(steps[0].grads[name].full_tensor(), grad, rtol=1e-6, atol=1e-8)


class Dtypes(nn.Module):
    """Notes what arrives: floating-point inputs are cast, others are left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.register_buffer("shift", torch.ones(5, dtype=torch.float64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, mask: Tensor, ids: Tensor, nested: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        self.seen = [x.dtype, mask.dtype, ids.dtype, nested["x"][0].dtype, self.linear.weight.dtype, self.shift.dtype]
        return {"float": self.linear(x), "long": ids, "none": None, "double": nested["x"][0].double()}


@on_ranks(1, 2)
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("output_dtype", [None, torch.float32])
def test_what_is_cast_and_what_is_not(cast, output_dtype):
    model = Dtypes()
    fully_shard(
        model,
        mesh=cpu_mesh(),
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output_dtype, cast_forward_inputs=cast),
    )
    x = torch.randn(3, 7) if cast else torch.randn(3, 7, dtype=BF16)
    output = model(
        x,
        mask=torch.ones(3, dtype=torch.bool),
        ids=torch.arange(3),
        nested={"x": [torch.randn(2, dtype=torch.float64)]},
    )
    assert model.seen == [BF16, torch.bool, torch.int64, BF16 if cast else torch.float64, BF16, torch.float64]
    assert output["float"].dtype == (output_dtype or BF16)
    assert output["double"].dtype == (output_dtype or torch.float64)
    assert output["long"].dtype == torch.int64
    assert output["none"] is None


@on_ranks(1, 2, 4)
def test_parameters_of_several_dtypes_share_one_compute_dtype():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, 6)
            self.last = nn.Linear(6, 5, dtype=BF16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)))

    model = Model()
    low = copy.deepcopy(model).to(BF16)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    x = batches()[0]
    assert torch.equal(forward_backward(model, x), forward_backward(low, x.to(BF16)))
    assert isinstance(model, FSDPModule)
    for ours, theirs in zip(model.parameters(), low.parameters(), strict=True):
        assert ours.grad.dtype == ours.dtype
        assert torch.equal(ours.grad.full_tensor().float(), theirs.grad.float())
