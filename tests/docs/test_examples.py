"""The examples in the docstrings of the reference run on two ranks; tests/test_architecture.py asks for one in each docstring."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.policy import AllGather, ReduceScatter
from harness import cpu_mesh, on_ranks
from harness.public_names import example_of, public_names

SLOW = {"fsdp2.compile", "fsdp2.trace"}  # the compiler starts, or the profiler
WITH_EXAMPLE = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name, thing in public_names().items() if example_of(thing)
]


class Gather(AllGather):
    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(ReduceScatter):
    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])


def names_of_examples(folder: str) -> dict[str, object]:
    """What docs/reference/index.md says that examples begin with."""
    model = blocks()
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    return {
        "__name__": "example",
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "warnings": warnings,
        "fsdp2": fsdp2,
        "net": blocks(),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "x": torch.randn(4, 16),
        "mesh": cpu_mesh(),
        "folder": Path(folder),
        "gather": Gather(),
        "scatter": Scatter(),
    }


@on_ranks(2)
@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_the_example_of_a_public_name_runs(name):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    names = names_of_examples(folder[0])
    exec(compile(example_of(public_names()[name]), name, "exec"), names)
