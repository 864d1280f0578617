"""The programs of examples/clients/ as their user runs them: on fsdp2 they have the losses of torch's FSDP2, or of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "clients"
ON_TORCH = {  # on torch's FSDP2 without `-m fsdp2.run`; which packages they need
    "trainer": ["transformers", "accelerate"],
    "accelerate_loop": ["accelerate"],
    "fabric_loop": ["lightning_fabric"],
    "qlora": ["transformers", "peft", "torchao"],
    "sft": ["transformers", "peft", "trl"],
}
UNSHARDED = {"pipeline": 4, "experts": 4, "torchtitan_debug_model": 2}  # on so many ranks and on one


def losses(program: str, ranks: int, *launcher: str, **variables: str) -> torch.Tensor:
    """The numbers in the last line that it prints. variables: of the environment"""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *launcher]
    command = [*torchrun, str(FOLDER / f"{program}.py")]
    environment = os.environ | {"PYTHONPATH": path} | alone | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    return torch.tensor([float(each) for each in line.split()[1:]])


def needs(*packages: str) -> None:
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'fsdp2[clients]'")


@pytest.mark.full
@pytest.mark.parametrize("program", ON_TORCH)
def test_a_program_for_torchs_fsdp2_has_the_same_losses_on_fsdp2(program):
    needs(*ON_TORCH[program])
    ours, theirs = losses(program, 2, "-m", "fsdp2.run"), losses(program, 2)
    assert len(ours) >= 6
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.full
@pytest.mark.parametrize(
    "sharding",
    [
        {"fsdp_size": 4, "ep_size": 2},
        {"fsdp_size": 4, "ep_size": 4},
        {"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2},
        {"fsdp_size": 2, "ep_size": 2, "tp_size": 2},
        {"fsdp_size": 4, "ep_size": 2, "fsdp_mixed_precision": True},
    ],
    ids=str,
)
def test_a_model_that_transformers_shards_while_it_loads_it_has_the_same_losses_on_fsdp2(sharding):
    needs("transformers", "accelerate")
    ours, theirs = (losses("load_sharded", 4, *launcher, SHARDING=json.dumps(sharding)) for launcher in (["-m", "fsdp2.run"], []))
    assert len(ours) == 6
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "program",
    [pytest.param(program, marks=pytest.mark.full if "torchtitan" in program else pytest.mark.slow) for program in UNSHARDED],
)
def test_a_sharded_program_has_the_losses_of_one_process(program):
    needs(*(["torchtitan", "triton"] if program == "torchtitan_debug_model" else []))
    sharded, whole = losses(program, UNSHARDED[program], "-m", "fsdp2.run"), losses(program, 1)
    assert len(sharded) >= 4
    torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("launcher", [(), ("-m", "fsdp2.run")], ids=["torch's FSDP2", "fsdp2"])
@pytest.mark.parametrize("program", ON_TORCH)
def test_the_doctor_finds_nothing_in_a_program_of_another_library(program, launcher):
    needs(*ON_TORCH[program])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "fsdp2", "doctor", "--strict", *launcher, str(FOLDER / f"{program}.py")]
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the doctor found nothing" in done.stdout
