"""Each program of examples/ that trains is proven, as ``fsdp2 prove`` runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAMS: dict[str, tuple[int, str, str]] = {
    "train_lm.py": (
        2,
        "--layers 2 --width 32 --heads 2 --batch 4 --context 32 --text-bytes 200000 --eval-batches 1 --out {folder}",
        "",
    ),
    "finetune_hf.py": (2, "--pairs 80 --input-length 40 --width 32 --batch 8 --steps 20 --out {folder}", "transformers"),
    "multimodal.py": (2, "", ""),
    "grpo_toy.py": (2, "--prompts 4", ""),
    "tutorial/step1_two_processes.py": (2, "", ""),
    "tutorial/step2_large_models.py": (2, "", ""),
    "tutorial/step3_stop_and_resume.py": (2, "--folder {folder}", ""),
    "tutorial/step4_many_hosts.py": (2, "", ""),
    "clients/experts.py": (4, "", ""),
    "clients/pipeline.py": (4, "", ""),
    "clients/fabric_loop.py": (2, "", "lightning_fabric"),
    "clients/accelerate_loop.py": (2, "", "accelerate"),
    "clients/trainer.py": (2, "", "transformers accelerate"),
    "clients/qlora.py": (2, "", "transformers peft torchao"),
    "clients/sft.py": (2, "", "transformers peft trl"),
    "clients/torchtitan_debug_model.py": (2, "", "torchtitan triton"),
}
"""Ranks, arguments, and packages that it needs. Not here: elastic/train.py goes on from its own last checkpoint."""


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_is_proven(program: str, tmp_path: Path) -> None:
    ranks, arguments, packages = PROGRAMS[program]
    if missing := [each for each in packages.split() if importlib.util.find_spec(each) is None]:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'fsdp2[clients]'")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    own = [str(ROOT / "examples" / program), "--", *arguments.format(folder=tmp_path / "own").split()]
    command = [sys.executable, "-m", "fsdp2", "prove", "--format", "json", "--ranks", str(ranks), "--steps", "3", *own]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    print(program, said["seconds"])
    assert (done.returncode, said["verdict"], said["faults"]) == (0, "proven", []), said
