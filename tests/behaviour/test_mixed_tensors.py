"""torch's "got mixed torch.Tensor and DTensor" names the parameter, the cause and the fix where a parameter of ours is meant."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsdp2
from harness import cpu_mesh, on_ranks


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

    def encode(self, x):
        return self.inner(x)


class TwoTowers(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = Tower(), Tower()
        self.way = way

    def forward(self, x):
        x = self.first(x)
        if self.way == "method":
            return self.second.encode(x)
        if self.way == "weight":
            return F.linear(x, self.second.inner.weight)
        return self.second(x)


@on_ranks(2)
@pytest.mark.parametrize(
    ("way", "cause", "fix"),
    [
        ("method", "Tower.encode of second uses it", 'register_fsdp_forward_method(module, "encode")'),
        ("weight", "TwoTowers uses it, while the forward of its unit", "fully_shard([a, b])"),
    ],
)
def test_the_error_names_parameter_cause_and_fix(way, cause, fix):
    model = TwoTowers(way)
    for tower in (model.first, model.second):
        fsdp2.fully_shard(tower, mesh=cpu_mesh(2))
    fsdp2.fully_shard(model, mesh=cpu_mesh(2))
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        model(torch.ones(2, 4))
    text = str(caught.value)
    assert text.count("a sharded parameter met a plain tensor: second.inner.weight (4, 4)") == 1
    assert cause in text
    assert fix in text
    fsdp2.register_fsdp_forward_method(model.second, "encode")
    if way == "method":
        model(torch.ones(2, 4)).sum().backward()  # what the fix says is one


@on_ranks(2)
@pytest.mark.parametrize("asks", ["a lambda", "a function"])
def test_the_fix_names_no_function_that_is_no_method(asks):
    """A hook that runs before ours: the fix named ``inner``, a function within torch's that calls hooks."""
    model = fsdp2.fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(2))

    def inner(self, args):
        return self.weight @ args[0]

    model.register_forward_pre_hook(inner if asks == "a function" else lambda self, args: self.weight @ args[0], prepend=True)
    with pytest.raises(RuntimeError, match="a sharded parameter met a plain tensor") as caught:
        model(torch.ones(4, 4))
    assert "Linear uses it, while the forward of its unit" in str(caught.value)


@on_ranks(2)
def test_errors_about_other_tensors_stay_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4))
    fsdp2.fully_shard(model, mesh=cpu_mesh(2))
    other = torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), cpu_mesh(2))
    model[0].register_forward_hook(lambda module, args, output: output @ other)
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        model(torch.ones(2, 4))
    assert "sharded parameter" not in str(caught.value)


PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
import fsdp2
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(nn.Linear(4, 4))
average = [param.detach().clone() for param in model.parameters()]
fsdp2.fully_shard(model)
def update():
    for kept, param in zip(average, model.parameters()):
        kept.mul_(0.9).add_(param, alpha=0.1)
update()
"""


def test_what_ends_a_program_is_explained_by_fsdp2_run(tmp_path):
    program = tmp_path / "average.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "fsdp2", "run", str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "met a plain tensor: 0.weight (4, 4)" in done.stderr
    assert "update uses it outside of any module's forward" in done.stderr
    assert "param.to_local() on both sides" in done.stderr


@on_ranks(1)
def test_the_hook_for_uncaught_errors_stays_as_it_is():
    before = sys.excepthook
    fsdp2.fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(1))
    assert sys.excepthook is before
