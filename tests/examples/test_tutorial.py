"""The programs of docs/tutorial.md as their reader runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def losses(program: str, *flags: str, ranks: int = 2) -> list[float]:
    """By step, what the program printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*torchrun, str(ROOT / "examples" / "tutorial" / program), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


def test_steps_one_and_two_learn_alike():
    first, second = losses("step1_two_processes.py"), losses("step2_large_models.py")
    assert len(first) == len(second) == 30
    assert max(first[-5:]) < 0.6 * first[0]
    torch.testing.assert_close(torch.tensor(second[-5:]).mean(), torch.tensor(first[-5:]).mean(), rtol=0.05, atol=0)


def test_a_run_that_goes_on_with_three_ranks_has_the_losses_of_one_that_never_stopped(tmp_path):
    whole = losses("step3_stop_and_resume.py", "--folder", str(tmp_path / "whole"), "--stop-at", "8")
    begun = losses("step3_stop_and_resume.py", "--folder", str(tmp_path / "two"), "--stop-at", "4")
    resumed = losses("step3_stop_and_resume.py", "--folder", str(tmp_path / "two"), "--stop-at", "8", ranks=3)
    assert begun == whole[:4]
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole[4:]), rtol=0.01, atol=0)


def test_compiling_changes_rounding_only_and_the_profile_names_collectives(tmp_path):
    plain = losses("step4_many_hosts.py", "--profile", str(tmp_path / "trace.json"))
    compiled = losses("step4_many_hosts.py", "--compile")
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=1e-3, atol=0)
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"FSDP::all_gather (blocks.1)", "FSDP::reduce (blocks.1)"} <= names
