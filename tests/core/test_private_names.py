"""A private name that a release of torch has dropped is missed where it is needed, by an error that names it, not at an import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fsdp2"
NAMES = sorted(
    f"{prefix}{path}"
    for text in [path.read_text() for path in PACKAGE.rglob("*.py")]
    for prefixed, path in re.findall(r'torch_name\(\s*(f?)"([^"]+)"', text)
    for prefix, path in [("torch._C._dynamo.eval_frame." if prefixed else "", path.removeprefix("{_eval_frame}"))]
)
NEEDED = {
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch._C._are_functorch_transforms_active",
    "torch._C._current_graph_task_id",
}
"""Those without which no module can be sharded and trained."""

PROGRAM = """
import importlib, os, sys, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.pipelining
from torch import nn

def dropped(path):  # what puts it back: torch's own code looks some of these names up
    home, _, name = path.rpartition(".")
    home = importlib.import_module(home)
    kept = getattr(home, name)
    delattr(home, name)
    return lambda: setattr(home, name, kept)

def step():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        fsdp2.fully_shard(each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return "trains"

for paths in eval(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:
        returns = [dropped(path) for path in paths]
        said = "no import"
        try:
            import fsdp2
            for each in returns:
                each()
            said = "no step"
            said = step()
        except Exception as error:
            said += ": " + " ".join(repr(error).split())
        finally:
            print(said, flush=True)
            os._exit(0)
    os.wait()
"""


def outcomes(dropped: list[list[str]]) -> list[str]:
    """What becomes of an import and two steps, each time without some of torch's names."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, repr(dropped)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_fsdp2_trains_without_all_the_names_that_a_step_does_not_need():
    assert set(NAMES) > NEEDED
    assert outcomes([[name for name in NAMES if name not in NEEDED]]) == ["trains"]


@pytest.mark.slow
def test_each_dropped_name_is_named_where_it_is_needed_and_nowhere_else():
    expected = [f"has no {name}, which this needs" if name in NEEDED else "trains" for name in NAMES]  # an FSDPError
    found = outcomes([[name] for name in NAMES])
    assert len(found) == len(expected)
    assert [(name, said) for name, said, text in zip(NAMES, found, expected, strict=True) if text not in said] == []


def test_no_file_that_fsdp2_imports_at_once_imports_private_names_of_torch_by_itself():
    private = re.compile(r"^(?:from (torch\S*\._\S*|torch\S*) import .*|import (torch\S*\._\S+).*)$", re.MULTILINE)
    command = [
        sys.executable,
        "-c",
        "import fsdp2, sys; print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('fsdp2')], sep='\\n')",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    files = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    found = [
        f"{Path(file).relative_to(PACKAGE)}: {line[0]}"
        for file in files
        for line in private.finditer(Path(file).read_text())
        if re.search(r"[ .]_[a-z]", line[0])
    ]
    assert len(files) > 50
    assert found == []
