"""Training on the pretend accelerator: ours, and torch's FSDP2 as the control, bitwise as on the CPU in any legal order."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import batches, mlp
from harness.training import Step, assert_same_bits, fed_own_chunk, forward_backward, sgd

BF16 = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@dataclass(frozen=True)
class Scenario:
    """One way to train. mesh: its shape, () for all ranks; torch_too: torch's FSDP2 trains so as well."""

    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = ()
    prepare: Callable[[Any], None] = lambda model: None
    iteration: Callable[[Any, Tensor], Tensor] = forward_backward
    torch_too: bool = True


def in_two_micro_batches(model: Any, x: Tensor, reduce_first: bool = True) -> Tensor:
    losses = []
    for index, rows in enumerate(x.chunk(2)):
        model.set_is_last_backward(index == 1)
        model.set_requires_gradient_sync(reduce_first or index == 1)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean()


def in_partly_reduced_micro_batches(model: Any, x: Tensor) -> Tensor:
    losses = []
    for index, rows in enumerate(x.chunk(2)):
        model.set_is_last_backward(index == 1)
        model.set_requires_all_reduce(index == 1)
        losses.append(model(rows).square().mean())
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean()


def with_an_evaluation(model: Any, x: Tensor) -> Tensor:
    loss = forward_backward(model, x)
    with torch.no_grad():
        model(x)
    return loss


def prefetch_two_deep(model: Any) -> None:
    order = [model, *model.blocks]
    for index, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 3])
        module.set_modules_to_backward_prefetch(order[max(index - 2, 1) : index][::-1])


SCENARIOS = {
    "plain": Scenario(),
    "bf16": Scenario(options=BF16),
    "evaluation": Scenario(iteration=with_an_evaluation),
    "keep_after_forward": Scenario(options={"reshard_after_forward": False}),
    "micro_batches": Scenario(iteration=in_two_micro_batches),
    "micro_batches_unreduced": Scenario(iteration=lambda model, x: in_two_micro_batches(model, x, reduce_first=False)),
    "two_deep": Scenario(prepare=prefetch_two_deep),
    "offload": Scenario(options={"offload_policy": fsdp2.CPUOffloadPolicy()}),
    "offload_bf16": Scenario(options={**BF16, "offload_policy": fsdp2.CPUOffloadPolicy()}),
}
SCENARIOS_2D = {
    "hsdp": Scenario(mesh=(1, 2)),
    "replicated": Scenario(mesh=(2, 1)),
    "replicated_bf16": Scenario(mesh=(2, 1), options=BF16),
    "replicated_partial": Scenario(mesh=(2, 1), iteration=in_partly_reduced_micro_batches, torch_too=False),
    "replicated_partial_bf16": Scenario(mesh=(2, 1), options=BF16, iteration=in_partly_reduced_micro_batches, torch_too=False),
}


def train(scenario: Scenario, device_type: str, fully_shard: Any = fsdp2.fully_shard) -> list[Step]:
    """Three steps of a model on ``device_type``; what came of them, on the host."""
    shape = scenario.mesh or (dist.get_world_size(),)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model: Any = mlp().to(device_type)
    options = dict(scenario.options)
    if fully_shard is torch_fsdp.fully_shard:
        translate = {"mp_policy": torch_fsdp.MixedPrecisionPolicy, "offload_policy": torch_fsdp.CPUOffloadPolicy}
        options = {name: translate[name](**vars(value)) if name in translate else value for name, value in options.items()}
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, **options)
    scenario.prepare(model)
    inputs = [x.to(device_type) for x in batches(3, (8, 7))]
    return on_host(fed_own_chunk(model, inputs, sgd, scenario.iteration))


def on_host(steps: list[Step]) -> list[Step]:
    def local(tensor: Tensor | None) -> Any:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        return None if tensor is None else tensor.detach().cpu()

    def locals_of(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: local(tensor) for name, tensor in tensors.items()}

    return [Step(local(step.loss), locals_of(step.grads), locals_of(step.params)) for step in steps]


def train_late(seed: int | None, scenario: Scenario, **more: Any) -> list[Step]:
    pretend.set_order(seed)
    steps = train(scenario, "pretend", **more)
    pretend.synchronize()
    return steps


NUM_SEEDS = int(os.environ.get("PRETEND_SEEDS", "2"))


def slow_but(names: Any, *quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@on_ranks(1, device="pretend")
@pytest.mark.parametrize("name", slow_but(SCENARIOS, "micro_batches", "offload"))
def test_on_one_rank_every_order_trains_bitwise_as_the_cpu_does(name):
    expected = train(SCENARIOS[name], "cpu")
    for seed in (None, *range(NUM_SEEDS)):
        assert_same_bits(train_late(seed, SCENARIOS[name]), expected)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", slow_but([*SCENARIOS, *SCENARIOS_2D], "bf16", "hsdp", "replicated_partial"))
def test_on_two_ranks_every_order_trains_bitwise_as_the_cpu_does(name):
    scenario = {**SCENARIOS, **SCENARIOS_2D}[name]
    expected = train(scenario, "cpu")
    for seed in (None, *range(NUM_SEEDS)):
        assert_same_bits(train_late(seed, scenario), expected)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", slow_but(["plain", "bf16", "micro_batches", "offload", "hsdp"], "plain"))
def test_the_control_torchs_own_fsdp2_trains_bitwise_alike_in_every_order(name):
    scenario = {**SCENARIOS, **SCENARIOS_2D}[name]
    expected = train_late(None, scenario, fully_shard=torch_fsdp.fully_shard)
    for seed in range(NUM_SEEDS):
        assert_same_bits(train_late(seed, scenario, fully_shard=torch_fsdp.fully_shard), expected)
