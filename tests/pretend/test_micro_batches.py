"""Micro-batches whose backward is not the last: what is written, read and held between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import batches, mlp
from harness.pretend_training import BF16


def sharded(*shape: int, **options: Any) -> Any:
    model: Any = mlp().to("pretend")
    mesh = init_device_mesh("pretend", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for module in [*model.blocks, model]:
        fsdp2.fully_shard(module, mesh=mesh, **options)
    model.set_is_last_backward(False)
    return model


def step_in_backward(seed: int | None) -> list[Tensor]:
    pretend.set_order(seed)
    model = sharded(4)
    optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        optimizers[param] = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(step)
    for x in batches(4, (8, 7)):
        model(x.to("pretend")).square().mean().backward()
    return [param.to_local().cpu() for param in model.parameters()]


@on_ranks(4, device="pretend_model")
def test_what_an_optimizer_writes_in_a_backward_that_is_not_the_last_is_what_the_next_forward_gathers():
    expected = step_in_backward(None)
    for seed in range(10):
        assert all(map(torch.equal, step_in_backward(seed), expected)), f"seed {seed}"


@on_ranks(4, device="pretend_model")
def test_micro_batches_hold_no_buffers_of_those_before_them():
    """Symptom: every micro-batch added what its all-reduces had read."""
    model = sharded(2, 2, **BF16)
    allocated = []
    for x in batches(5, (8, 7)):
        model(x.to("pretend")).square().mean().backward()
        allocated.append(pretend.memory_stats()["allocated"])
    assert len(set(allocated[1:])) == 1


@on_ranks(4, device="pretend_model")
def test_pinned_inputs_may_be_refilled_when_forward_has_returned():
    wrong = []
    for seed in range(10):
        pretend.set_order(seed)
        model = sharded(4)
        x = batches(1, (8, 7))[0].pin_memory()
        expected = model(x.clone().to("pretend")).cpu()
        output = model(x)
        x.fill_(7)
        if not torch.equal(output.cpu(), expected):
            wrong.append(seed)
    assert wrong == []
