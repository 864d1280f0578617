"""``torch.set_default_device("cuda")``, as programs for GPUs begin: what belongs on the host is there nevertheless."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.checkpoint import full_optimizer_state_dict, full_state_dict, load_safetensors, save_safetensors
from fsdp2.optim import AnyPrecisionAdamW, Muon, flat, offloaded
from fsdp2.testing import pretend
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks
from harness.training import adamw, own_chunk


def sharded(**options: object) -> nn.Module:
    model = mlp()
    return shard_blocks(model, **options)


@contextlib.contextmanager
def on_the_device():
    torch.set_default_device("pretend")
    try:
        yield
    finally:
        torch.set_default_device(None)


OPTIMIZERS = {
    "AnyPrecisionAdamW": lambda model: AnyPrecisionAdamW(model.parameters()),
    "flat AnyPrecisionAdamW": lambda model: flat(AnyPrecisionAdamW, model),
    "flat AdamW": lambda model: flat(torch.optim.AdamW, model),
    "Muon": Muon,
}


@on_ranks(2, device="pretend")
@pytest.mark.parametrize("name", [name if name == "Muon" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS])
@pytest.mark.parametrize("is_default", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_step_of_our_optimizers_waits_for_the_device(name, is_default):
    """Under a default device ``AnyPrecisionAdamW`` and ``Muon`` counted steps there, and waited for each count."""
    model, inputs = sharded(), [own_chunk(x).to("pretend") for x in batches(3)]
    with on_the_device() if is_default else contextlib.nullcontext():
        optimizer = OPTIMIZERS[name](model)
        for index, x in enumerate(inputs):
            model(x).square().mean().backward()
            with pretend.no_host_waits() if index > 0 else contextlib.nullcontext():
                optimizer.step()
                optimizer.zero_grad()
    pretend.synchronize()


@on_ranks(2, device="pretend")
def test_what_is_saved_is_gathered_on_the_host_and_read_into_the_shards(tmp_path):
    model, other, x = sharded(), sharded(), own_chunk(batches(1)[0]).to("pretend")
    optimizer = adamw(model.parameters())
    model(x).square().mean().backward()
    optimizer.step()
    expected = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    with on_the_device():
        save_safetensors(model, tmp_path)
        load_safetensors(other, tmp_path)
        state, states = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
        stepped = offloaded(torch.optim.AdamW, other, fsdp2.CPUOffloadPolicy())
        other(x).square().mean().backward()
        found = {name: value.full_tensor().cpu() for name, value in other.state_dict().items()}
        stepped.step()
    pretend.synchronize()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    if dist.get_rank() == 0:
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        tensors = [value for each in states["state"].values() for value in each.values()]
        assert {tensor.device.type for tensor in (*state.values(), *tensors)} == {"cpu"}


@on_ranks(2, device="pretend")
def test_units_on_a_mesh_of_the_host_are_saved_beside_units_on_the_device(tmp_path):
    """Of a batch, torch waits for what one backend sends; the other one's parts were written before they had come."""
    model = mlp()
    for block, device in zip(model.blocks, ("pretend", "cpu", "pretend"), strict=True):
        fsdp2.fully_shard(block, mesh=init_device_mesh(device, (2,)))
    fsdp2.fully_shard(model, mesh=cpu_mesh())
    save_safetensors(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    for name, value in mlp().state_dict().items():
        assert torch.equal(found[name], value), name
