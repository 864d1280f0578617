"""What is wrong with a call of ``parallelize`` is said before anything is changed, on every rank alike."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, accumulate, parallelize
from fsdp2.errors import ArgumentError, MeshError, ModuleError, OrderError, ParameterError
from fsdp2.state_bytes import expected_state_bytes
from fsdp2.wrap import plan
from harness import cpu_mesh, on_ranks
from harness.models import mlp


def last_bias(param: nn.Parameter) -> Shard | None:
    """Asks the impossible for the last parameter of ``mlp()`` alone: it belongs to the root, the last group."""
    return Shard(1) if tuple(param.shape) == (5,) else None


@on_ranks(2)
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"strategy": "zero4"}, ArgumentError, ["'zero4'", "'zero1', 'zero2', 'zero3', 'hsdp'", "fix:      strategy='zero"]),
        ({"strategy": "fsdp"}, ArgumentError, ["fix:      strategy='zero3'"]),
        ({"strategy": "ShardingStrategy.HYBRID_SHARD"}, ArgumentError, ["fix:      strategy='hsdp'"]),
        ({"strategy": None}, ArgumentError, ["None", "docs/strategies.md"]),
        ({"strategy": ["zero3"]}, ArgumentError, ["['zero3']"]),
        ({"strategy": "zero2", "shard_size": 2}, ArgumentError, ["shard_size=2", "['hsdp', 'hsdp_zero2', 'hsdp_global']"]),
        ({"strategy": "hsdp", "shard_size": 3}, ArgumentError, ["shard_size is 3", "2 ranks", "[1, 2]"]),
        ({"strategy": "hsdp", "shard_size": 0}, ArgumentError, ["shard_size is 0"]),
        ({"strategy": "hsdp", "shard_size": True}, ArgumentError, ["shard_size is True"]),
        ({"strategy": "hsdp_global"}, ArgumentError, ["neither shard_size nor a 2-D mesh", "LOCAL_WORLD_SIZE"]),
        ({"mesh": "cpu"}, ArgumentError, ["mesh='cpu'", "DeviceMesh"]),
        ({"wrap": "blocks"}, ArgumentError, ["wrap='blocks'", '"auto"']),
        ({"wrap": {int}}, ArgumentError, ["int", "subclasses of nn.Module"]),
        ({"wrap": {nn.Conv2d}}, ArgumentError, ["Conv2d", "matches no module", "'Block'"]),
        ({"mp_policy": None}, ArgumentError, ["mp_policy=None"]),
        ({"ignored_params": [1]}, ArgumentError, ["ignored_params"]),
        ({"model": "model"}, ModuleError, ["parallelize got an object of type str"]),
        ({"model": [nn.Linear(2, 2)]}, ModuleError, ["parallelize got an object of type list", "one nn.Module"]),
        ({"shard_placement_fn": last_bias}, ParameterError, ["last.bias (5,): Shard(1)"]),
        ({"model": nn.ModuleList([nn.Linear(2, 2)])}, ModuleError, ["ModuleList"]),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, error, words):
    model = arguments.pop("model", None) or mlp()
    before = list(model.parameters()) if isinstance(model, nn.Module) else []
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    with patch.dict(os.environ, environment, clear=True), pytest.raises(error) as raised:
        parallelize(model, **arguments)
    for word in [f"[rank {dist.get_rank()}]", *words]:
        assert word in str(raised.value)
    if isinstance(model, nn.Module):
        assert not isinstance(model, FSDPModule)
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


@on_ranks(4)
def test_meshes_are_taken_as_they_are_or_cut_into_nodes():
    with pytest.raises(MeshError, match="2-D mesh"):
        parallelize(mlp(), "zero3", mesh=cpu_mesh(2, 2))
    with pytest.raises(MeshError, match="shard_size=4"):
        parallelize(mlp(), "hsdp", mesh=cpu_mesh(2, 2), shard_size=4)
    with pytest.raises(MeshError, match="3-D"):
        parallelize(mlp(), "ddp", mesh=cpu_mesh(1, 2, 2))
    elsewhere = DeviceMesh("cpu", [(dist.get_rank() + 1) % 4], _init_backend=False)
    with pytest.raises(MeshError, match="not part of"):
        parallelize(mlp(), mesh=elsewhere)
    three = cpu_mesh(1, 2, 2, names=("dp", "node", "tp"))
    unnamed = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    cases = [
        ("ddp", {}, (4, 1)),
        ("ddp", {"mesh": cpu_mesh()}, (4, 1)),
        ("ddp", {"mesh": cpu_mesh(4, 1)}, (4, 1)),
        ("ddp", {"mesh": three["node"]}, (2, 1)),
        ("zero1", {"mesh": cpu_mesh()}, (4,)),
        ("hsdp", {"shard_size": 2}, (2, 2)),
        ("hsdp", {"shard_size": 1}, (4, 1)),
        ("hsdp", {"mesh": cpu_mesh(), "shard_size": 4}, (1, 4)),
        ("hsdp", {"mesh": cpu_mesh(2, 2)}, (2, 2)),
        ("hsdp_global", {"mesh": cpu_mesh(2, 2)}, (4,)),
        ("hsdp_global", {"mesh": unnamed}, (4,)),
        ("hsdp_global", {"mesh": cpu_mesh(), "shard_size": 2}, (4,)),
    ]
    for strategy, options, shape in cases:
        model = parallelize(mlp(), strategy, **options)
        weight = model.first.weight
        assert isinstance(weight, DTensor)
        assert tuple(weight.device_mesh.shape) == shape, (strategy, options)
        assert weight.placements == ((Shard(0),) if len(shape) == 1 else (Replicate(), Shard(0)))
        model(torch.randn(3, 7)).sum().backward()
        assert model.first.weight.grad is not None


@on_ranks(2)
def test_models_that_differ_between_ranks_are_refused_on_every_rank():
    """A broadcast or gather of other sizes would hang, or mix up values."""
    with pytest.raises(ModuleError, match=r"(?s)differ between ranks.*rank 0: 1.weight \(4, 4\).*rank 1: 1.weight \(5, 4\)"):
        parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + dist.get_rank())), "zero1")
    with pytest.raises(ModuleError, match=r"(?s)rank 0: group.*rank 1: 1.weight \(2, 2\)"):
        parallelize(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + dist.get_rank()))), "zero1", wrap=None)
    with pytest.raises(ModuleError, match="differ between ranks"):
        parallelize(mlp(), ["zero1", "zero2"][dist.get_rank()])
    with pytest.raises(ModuleError, match="differ between ranks"):
        parallelize(mlp(), ["ddp", "zero1"][dist.get_rank()])
    with pytest.raises(ModuleError, match="differ between ranks"):
        parallelize(mlp(), "hsdp", shard_size=1 + dist.get_rank())
    with pytest.raises(ArgumentError, match=r"(?s)shard_size is 3, and there are 2 ranks.*fix: +pass shard_size=2"):
        parallelize(mlp(), "hsdp", shard_size=3)
    with pytest.raises(ModuleError, match="differ between ranks"):
        parallelize(mlp(), wrap=["auto", None][dist.get_rank()])
    with pytest.raises(ModuleError, match="differ between ranks"):
        parallelize(mlp(), mp_policy=MixedPrecisionPolicy(reduce_dtype=[None, torch.bfloat16][dist.get_rank()]))
    with pytest.raises(ModuleError, match="differ between ranks"):
        parallelize(mlp(), offload_policy=[OffloadPolicy(), CPUOffloadPolicy()][dist.get_rank()])


@on_ranks(2)
def test_the_size_of_a_node_is_what_the_launcher_says():
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        model = parallelize(mlp(), "hsdp")
    assert tuple(model.first.weight.device_mesh.shape) == (2, 1)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="three"), pytest.raises(ArgumentError, match="LOCAL_WORLD_SIZE"):
        parallelize(mlp(), "hsdp")


@on_ranks(2)
def test_calls_in_a_wrong_order_are_refused():
    model = parallelize(mlp())
    with pytest.raises(ModuleError, match="already applied"):
        parallelize(model)
    with pytest.raises(ModuleError, match="sharded already"):
        plan(model)
    for wrong in (mlp(), None, [model]):
        with pytest.raises(ModuleError, match="not sharded"), accumulate(wrong):
            pass


def test_without_processes_the_error_says_how_to_start_them():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    with patch.dict(os.environ, environment, clear=True), pytest.raises(OrderError, match="torchrun"):
        parallelize(mlp())


def test_the_formula_refuses_what_is_no_strategy():
    with pytest.raises(ArgumentError, match="zero5"):
        expected_state_bytes("zero5", 10, world_size=2)
    with pytest.raises(ArgumentError, match="shard_size"):
        expected_state_bytes("hsdp", 10, world_size=2)
