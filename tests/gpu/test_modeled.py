"""The modeled group of ``make gpu`` against the pretend accelerator's own model: the same bits, in every order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp2.testing import pretend
from harness.training import assert_same_bits

NAMES = ("plain", "bf16", "hsdp", "replicated_bf16_all", "several_dtypes_hsdp", "extensions_direct")
RUN = """
import sys, torch, torch.distributed as dist
from fsdp2.testing import pretend
from gpu import modeled
from gpu.one_device import RACES, on_this_mesh
from harness.pretend_training import train_late

pretend.activate()
modeled.register("pretend")
backend, path, *names = sys.argv[1:]
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=4)
orders = (None,) if backend == pretend.MODEL else (None, 0, 1)
torch.save({name: [train_late(seed, on_this_mesh(RACES[name], 4)) for seed in orders] for name in names}, path)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(pretend.missing_tools()), reason="the pretend accelerator is compiled first")
def test_a_modeled_group_computes_what_the_pretend_accelerators_model_does(tmp_path):
    tests = Path(__file__).resolve().parents[1]
    found = []
    for backend in (pretend.MODEL, "fsdp2_modeled"):
        path = tmp_path / backend
        environment = {"PYTHONPATH": f"{tests.parent}:{tests}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", RUN, backend, str(path), *NAMES]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(path, weights_only=False))
    expected, ours = found
    for name in NAMES:
        for steps in ours[name]:
            assert_same_bits(steps, expected[name][0])
