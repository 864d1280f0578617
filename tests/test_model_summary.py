"""``fsdp2.summary``: what it tells is what the runtime has allocated."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from harness import cpu_mesh, on_ranks
from harness.subclasses import Unflattened


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * self.frozen.sum()


def sharded() -> Model:
    torch.manual_seed(0)
    model = Model()
    mesh = cpu_mesh(dist.get_world_size())
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fsdp2.fully_shard(model, mesh=mesh, ignored_params={model.frozen}, reshard_after_forward=False)


@on_ranks(2)
def test_figures_are_those_of_what_was_allocated():
    model = sharded()
    names = [param.fqn for group in model._get_fsdp_state().groups for param in group.params]
    told = fsdp2.summary(model)
    root, *layers = told.units
    assert (root.name, root.after_forward, root.numel) == ("", "kept", 7 * 6 + 1)
    assert [unit.name for unit in layers] == ["layers.0", "layers.1", "layers.2"]
    assert layers[0].dtypes == "float32 -> bfloat16, reduced in float32"
    assert layers[0].placement == "Shard(0) of 2"
    assert told.unsharded == ["frozen"]
    assert told.num_ranks == 2
    for unit, module in zip(told.units, (model, *model.layers), strict=True):
        (group,) = module._get_fsdp_state().groups
        assert unit.sharded_nbytes == group.flat.untyped_storage().nbytes()
        empty = group.flat.numel() - sum(param.spec.cut.slot_numel for param in group.params)
        assert unit.padding == empty / group.flat.numel()
        module.unshard()
        assert unit.unsharded_nbytes == sum(storage.nbytes() for storage in group.unsharded.storages())
        module.reshard()
    assert fsdp2.summary(model.layers).units[0].name == "0"
    assert [param.fqn for group in model._get_fsdp_state().groups for param in group.params] == names
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    averages = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert fsdp2.summary(model, optimizer).state.optimizer == sum(each.to_local().nbytes for each in averages if each.ndim)


@on_ranks(2)
def test_equal_units_share_a_row_of_the_table():
    told = fsdp2.summary(sharded())
    lines = str(told).splitlines()
    assert lines[0] == f"FSDPModel: 4 units over 2 ranks, {7 * 6 + 1 + 3 * 42} parameters"
    assert [line.split("  ")[0] for line in lines[2:4]] == ["(root)", "layers.0 to layers.2"]
    assert "3 x FSDPSequential" in lines[3]
    assert lines[4] == "not sharded: 1 parameter (frozen)"
    assert lines[5].startswith("this rank keeps now: parameters ")


def test_rich_shows_the_same_table():
    rich_console = pytest.importorskip("rich.console")
    told = fsdp2.summary(nn.Linear(2, 2))
    out = io.StringIO()
    rich_console.Console(file=out, width=160).print(told)
    assert "Linear: 0 units over 1 rank" in out.getvalue()
    assert "not sharded: 2 parameters (weight, bias)" in out.getvalue()


@on_ranks(2)
def test_an_all_gather_extension_that_does_not_say_what_it_is_made_of_is_counted_by_its_attributes():
    model = nn.Linear(8, 6, bias=False)
    model.weight = nn.Parameter(Unflattened(model.weight.detach()))
    fsdp2.fully_shard(model, mesh=cpu_mesh(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    state = fsdp2.summary(model, optimizer).state
    assert state.master == 3 * 8 * 4  # this rank's rows
    assert state.optimizer == 2 * 3 * 8 * 4
