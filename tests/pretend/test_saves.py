"""A save queues its copies on the device: training waits for none of them, and no later write reaches them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.checkpoint import Checkpointer
from fsdp2.testing import pretend
from harness import on_ranks
from harness.models import Block, mlp

OPTIMIZERS = {
    "torch's": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    "flat": lambda model: fsdp2.optim.flat(torch.optim.AdamW, model, lr=0.1, foreach=True),
}


def values(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Copies on the host of this rank's part."""
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    return {name: (each.to_local() if isinstance(each, DTensor) else each).cpu().clone() for name, each in found.items()}


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("way", OPTIMIZERS)
@pytest.mark.parametrize("seed", [None, 1])
def test_a_save_makes_the_training_thread_wait_for_nothing_and_has_the_values_of_its_step(tmp_path: Path, way: str, seed: Any) -> None:
    """Symptom: the host waited until the device had done all that was queued, and the copies."""
    model = fsdp2.parallelize(mlp().to("pretend"), "zero3", mesh=init_device_mesh("pretend", (dist.get_world_size(),)), wrap={Block})
    optimizer = OPTIMIZERS[way](model)
    x = torch.randn(2, 7).to("pretend")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    may_write, write = threading.Event(), Checkpointer._write

    def later(self: Checkpointer, *args: Any) -> None:
        may_write.wait()
        write(self, *args)

    with Checkpointer(tmp_path, model, optimizer) as checkpointer, patch.object(Checkpointer, "_write", later):
        may_write.set()
        step()
        checkpointer.save(0)
        checkpointer.wait()
        pretend.set_order(seed)
        for index in (1, 2):  # the second one writes to the memory of the first
            step()
            expected = values(model, optimizer)
            pretend.synchronize()
            may_write.clear()
            with pretend.no_host_waits():
                checkpointer.save(index)
                step()
            may_write.set()
            checkpointer.wait()
            after = values(model, optimizer)
            checkpointer.load(f"step_{index:06d}")
            found = values(model, optimizer)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], each) for name, each in expected.items())
            assert not all(torch.equal(found[name], each) for name, each in after.items())
    pretend.set_order(None)


@on_ranks(2, device="pretend")
def test_a_save_copies_each_flat_shard_and_each_state_of_a_flat_optimizer_once(tmp_path: Path) -> None:
    model = fsdp2.parallelize(mlp().to("pretend"), "zero3", mesh=init_device_mesh("pretend", (2,)), wrap={Block})
    optimizer = OPTIMIZERS["flat"](model)
    model(torch.randn(2, 7).to("pretend")).square().mean().backward()
    optimizer.step()
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        for index in range(2):
            pretend.synchronize()
            with pretend.traced() as ran:
                checkpointer.save(index)
                pretend.synchronize()
            checkpointer.wait()
    num_groups = len(fsdp2.inspect.units(model))
    copies = [entry for entry in ran if "copy to the host" in entry]
    assert len(copies) == 3 * num_groups, ran
