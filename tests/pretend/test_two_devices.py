"""A model on the host and one on an accelerator, in one process: streams and late comparisons of one leave the other's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import own_chunk, sgd

DEVICES = ("cpu", "pretend")


def sharded(device_type: str) -> Any:
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    model = mlp().to(device_type)
    return shard_blocks(model, mesh=mesh)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x.to(next(model.parameters()).device)).square().mean()


def one_after_the_other(models: list[Any], x: Tensor) -> None:
    for model in models:
        loss_of(model, x).backward()


def forwards_first(models: list[Any], x: Tensor) -> None:
    for loss in [loss_of(model, x) for model in models]:
        loss.backward()


def backwards_crossed(models: list[Any], x: Tensor) -> None:
    for loss in [loss_of(model, x) for model in models][::-1]:
        loss.backward()


def backwards_in_an_order_of_each_rank(models: list[Any], x: Tensor) -> None:
    """As they may come in one backward: autograd runs the nodes of each device on a thread of their own."""
    losses = [loss_of(model, x) for model in models]
    for loss in losses if dist.get_rank() == 0 else losses[::-1]:
        loss.backward()


def in_one_backward(models: list[Any], x: Tensor) -> None:
    torch.stack([loss_of(model, x).to("cpu") for model in models]).sum().backward()


def in_micro_batches(models: list[Any], x: Tensor) -> None:
    for index, rows in enumerate(x.chunk(2)):
        for model in models:
            model.set_is_last_backward(index == 1)
            loss_of(model, rows).backward()


def trained(devices: tuple[str, ...], step: Callable[[list[Any], Tensor], None]) -> dict[str, list[Tensor]]:
    """The parameters after three steps, by device."""
    models = [sharded(device) for device in devices]
    optimizers = [sgd(model.parameters()) for model in models]
    for x in batches(3):
        step(models, own_chunk(x))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {device: [param.full_tensor().cpu() for param in model.parameters()] for device, model in zip(devices, models, strict=True)}


def assert_trained_alike(step: Callable[[list[Any], Tensor], None], seed: int) -> None:
    pretend.set_order(None)
    expected = trained(("cpu",), step)["cpu"]
    for devices in (DEVICES, DEVICES[::-1]):
        pretend.set_order(seed)
        for device, params in trained(devices, step).items():
            # The CPU's products round by where their operands lie.
            assert_close(params, expected, msg=lambda text, at=(step.__name__, devices, device): f"{at}: {text}")
        pretend.synchronize()


@on_ranks(2, device="pretend", timeout=60)
def test_groups_of_two_devices_are_numbered_apart():
    """Symptom: where a rank came to the device's groups first, ranks were told that they had reduced different units together."""
    assert_trained_alike(backwards_in_an_order_of_each_rank, 0)


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_on_the_host_and_one_on_a_device_train_as_each_by_itself(seed):
    for step in (one_after_the_other, forwards_first, backwards_crossed, in_one_backward, in_micro_batches):
        assert_trained_alike(step, seed)
