"""Some units' parameters and gradients live on the host, those of others on the device: numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.optim import in_backward, offloaded
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import batches, mlp
from harness.pretend_training import on_host
from harness.sharding import shard_blocks
from harness.training import Step, adamw, assert_same_bits, fed_own_chunk, forward_backward, sgd


def clipped(model: Any, x: Tensor) -> Tensor:
    loss = forward_backward(model, x)
    fsdp2.clip_grad_norm_(model.parameters(), 0.1)
    return loss


def train(device_type: str, on_the_host: set[int]) -> list[Step]:
    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    model = mlp(num_blocks=4).to(device_type)
    for index, block in enumerate(model.blocks):
        policy = fsdp2.CPUOffloadPolicy() if index in on_the_host else None
        fsdp2.fully_shard(block, mesh=mesh, offload_policy=policy)
    fsdp2.fully_shard(model, mesh=mesh)
    if device_type != "cpu":
        assert {block.scale.device.type for block in model.blocks} == {"cpu", device_type}
    return on_host(fed_own_chunk(model, [x.to(device_type) for x in batches(3, (8, 7))], sgd, clipped))


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("on_the_host", [{0, 1}, pytest.param({1, 3}, marks=pytest.mark.slow)])
def test_units_on_the_host_train_beside_units_on_the_device(on_the_host):
    expected = train("cpu", set())
    for seed in (None, 0, 1):
        pretend.set_order(seed)
        assert_same_bits(train("pretend", on_the_host), expected)
        pretend.synchronize()


def with_states_on_the_host(
    device_type: str, fraction: float, folder: str | None, max_norm: float | None, **options: Any
) -> list[Step]:
    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    model = mlp(num_blocks=4).to(device_type)
    shard_blocks(model, mesh=mesh)
    inputs = [x.to(device_type) for x in batches(3, (8, 7))]
    if device_type == "cpu":
        return on_host(fed_own_chunk(model, inputs, adamw, clipped if max_norm else forward_backward))
    policy = fsdp2.CPUOffloadPolicy() if folder is None else fsdp2.DiskOffloadPolicy(folder)
    optimizer = offloaded(torch.optim.AdamW, model, policy, fraction=fraction, lr=0.01, **options)
    steps = on_host(fed_own_chunk(model, inputs, iteration=clipped if max_norm else forward_backward, optimizer=optimizer))
    places = {name: optimizer.state[param]["exp_avg"].to_local().device.type for name, param in model.named_parameters()}
    assert set(places.values()) == ({"cpu"} if fraction == 1.0 else {"cpu", device_type})
    assert places["blocks.3.up.weight"] == "cpu"  # its gradient is among the first ones
    assert {param.device.type for param in model.parameters()} == {device_type}
    return steps


@on_ranks(2, device="pretend")
@pytest.mark.parametrize(
    ("fraction", "on_disk", "max_norm"),
    [(0.5, False, 0.1), pytest.param(1.0, False, None, marks=pytest.mark.slow), pytest.param(1.0, True, None, marks=pytest.mark.slow)],
)
def test_states_on_the_host_give_the_values_of_states_on_the_device(fraction, on_disk, max_norm, tmp_path):
    expected = with_states_on_the_host("cpu", fraction, None, max_norm)
    for seed in (None, 0, 1):
        pretend.set_order(seed)
        assert_same_bits(with_states_on_the_host("pretend", fraction, str(tmp_path) if on_disk else None, max_norm), expected)
        pretend.synchronize()


class Latest:
    """In the place of a thread: each step is taken just before somebody waits for it, later than any thread takes it."""

    def submit(self, action: Callable[[Any], Any], argument: Any) -> Any:
        return SimpleNamespace(result=lambda: action(argument))


@on_ranks(2, device="pretend")
@pytest.mark.parametrize(
    ("is_latest", "fraction", "on_disk"),
    [
        (False, 1.0, True),
        pytest.param(False, 0.5, False, marks=pytest.mark.slow),
        pytest.param(True, 1.0, True, marks=pytest.mark.slow),
        pytest.param(True, 0.5, False, marks=pytest.mark.slow),
    ],
)
def test_steps_in_backward_give_the_values_of_steps_on_the_device(is_latest, fraction, on_disk, tmp_path, monkeypatch):
    """However fast the thread is that takes them."""
    if is_latest:
        monkeypatch.setattr(in_backward, "ThreadPoolExecutor", lambda *args, **kwargs: Latest())

    def values(device_type: str) -> list[Step]:
        folder = str(tmp_path) if on_disk else None
        steps = with_states_on_the_host(device_type, fraction, folder, None, step_in_backward=True)
        return [replace(step, grads={}) for step in steps]  # of which those on the host are gone

    expected = values("cpu")
    for seed in (None, 0, 1, 2):
        pretend.set_order(seed)
        assert_same_bits(values("pretend"), expected)
        pretend.synchronize()
