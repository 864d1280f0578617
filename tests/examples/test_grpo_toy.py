"""examples/grpo_toy.py as its user runs it, and as `fsdp2 prove` judges it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "grpo_toy.py")


def printed(*command: str) -> str:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_reward_rises():
    said = printed("torch.distributed.run", "--standalone", "--nproc_per_node=3", EXAMPLE, "--steps=31", "--prompts=12")
    rewards = [float(each) for each in re.findall(r"reward ([\d.]+)", said)]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.7
    assert re.findall(r"version +(\d+)", said)[-1] == "31"


@pytest.mark.slow
def test_it_is_proven():
    said = printed("fsdp2", "prove", "--ranks=2", EXAMPLE, "--steps=3", "--prompts=4")
    assert "nothing is wrong" in said
    for what in ("losses", "gradients", "parameters"):
        assert re.search(rf"\[ok\] +{what} \(measured\)", said), said
