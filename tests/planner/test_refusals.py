"""What ``fsdp2.plan`` cannot plan is refused in its own words, before torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.errors import ArgumentError, FSDPError, ModuleError


def rows(batch: int, sequence: int) -> tuple[torch.Tensor]:
    return (torch.ones(batch, 4),)


REFUSED: dict[str, tuple[nn.Module, dict[str, Any], type[FSDPError], str]] = {
    "all frozen": (nn.Linear(4, 4).requires_grad_(False), {}, ModuleError, "Linear without parameters that train"),
    "no parameters": (nn.ReLU(), {}, ModuleError, "ReLU without parameters that train"),
    "a tensor instead of a tuple": (nn.Linear(4, 4), {"inputs": lambda *_: torch.ones(2, 4)}, ArgumentError, "that returned a Tensor"),
    "a loss of several numbers": (nn.Linear(4, 4), {"loss": lambda output, _: output}, ModuleError, r"its shape is \(2, 4\)"),
    "a loss that depends on nothing": (nn.Linear(4, 4), {"loss": lambda *_: torch.ones(())}, ModuleError, "nothing that it depends on"),
    "a loss that is a number": (nn.Linear(4, 4), {"loss": lambda *_: 1.0}, ModuleError, "it is a float"),
    "no such checkpointing": (nn.Linear(4, 4), {"checkpointing": "fulll"}, ArgumentError, "checkpointing='fulll'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_cannot_be_made_says_why(name):
    model, options, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        fsdp2.plan(model, 2, **({"inputs": rows, "batch": 2} | options))
