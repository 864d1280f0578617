"""The multimodal example as its reader runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_model_learns_to_read_images_that_only_one_rank_has():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(ROOT / "examples" / "multimodal.py"),
    ]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    losses = [tuple(map(float, each)) for each in re.findall(r"text (\d+\.\d+)  captions (\d+\.\d+)", done.stdout)]
    assert len(losses) == 30
    assert losses[-1][0] < 0.7 * losses[0][0]
    assert losses[-1][1] < 0.1
