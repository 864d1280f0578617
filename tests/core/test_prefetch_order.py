"""When the next unit is gathered: from the second forward on, while the unit before it runs, from its first module on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import inspect
from harness import cpu_mesh, on_ranks

SINGLE = ((0,), (1,), (2,), (3,), (4,), (5,))
PAIRS = ((0, 1), (2, 3), (4, 5))
TRIPLES = ((0, 1, 2), (3, 4, 5))
APART = ((0, 5), (1, 2), (3, 4))
"""Layers by unit."""


class Gathers(inspect.Listener):
    """The units whose all-gather began, in order."""

    def __init__(self) -> None:
        self.units: list[str] = []

    def issued(self, record: Any, *rest: Any) -> None:
        if record.kind == "all-gather":
            self.units.append(record.unit)


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.num_gathered.append(len(self.gathers.units))
        return super().forward(x).tanh()


class Stack(nn.Module):
    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6, 6) for _ in range(6))
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("units", [SINGLE, PAIRS, TRIPLES, APART])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("wrapped", [False, True], ids=["", "each layer in a unit without parameters"])
def test_the_next_unit_is_gathered_while_the_first_module_of_the_one_before_runs(units, recomputed, with_grad, wrapped):
    """Symptom: of a list of modules, the last one alone ran alongside the next gather; before a unit without parameters, none did."""
    model = Stack(recomputed)
    layers = list(model.layers)
    for unit in units:
        fsdp2.fully_shard([layers[index] for index in unit], mesh=cpu_mesh(2), reshard_after_forward=True)
    if wrapped:
        model.layers = nn.ModuleList(fsdp2.fully_shard(nn.Sequential(layer), mesh=cpu_mesh(2)) for layer in layers)
    fsdp2.fully_shard(model, mesh=cpu_mesh(2))
    gathers = Gathers()
    for layer in layers:
        layer.gathers, layer.num_gathered = gathers, []
    with torch.set_grad_enabled(with_grad):
        model(torch.ones(2, 6))
        undo = inspect.listen(gathers)
        model(torch.ones(2, 6))
        undo()
    for place, unit in enumerate(units):
        assert layers[unit[0]].num_gathered == [0, min(place + 2, len(units))], unit
