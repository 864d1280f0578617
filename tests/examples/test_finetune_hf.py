"""The fine-tuning example as its user runs it: torchrun or alone, on the CPU, with few steps; then its folder is looked at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="needs transformers")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune_hf.py"


def run(ranks: int, out: Path, steps: int) -> str:
    """What it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    tiny = ["--pairs=80", "--input-length=40", "--width=32", "--batch=8"]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(EXAMPLE), f"--out={out}", f"--steps={steps}", *tiny]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_all(folder: Path) -> dict[str, object]:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_and_transformers_opens_what_it_saves(tmp_path: Path, ranks: int) -> None:
    printed = run(ranks, tmp_path, steps=20 if ranks == 2 else 5)
    before = float(re.search(r"before: ([0-9.]+)", printed)[1])
    opened, sharded = map(float, re.search(r"opened by transformers as T5\w+: ([0-9.]+), sharded ([0-9.]+)", printed).groups())
    assert abs(opened - sharded) < 2e-3
    assert sharded < before - 0.2
    assert printed.count("generated:") == 3

    old, new = read_all(tmp_path / "pretrained"), read_all(tmp_path / "finetuned")
    assert old.keys() == new.keys()
    assert sum(not old[key].equal(new[key]) for key in old) > len(old) // 2
    read = [int(each.replace(",", "")) for each in re.findall(r"rank \d has read ([0-9,]+) bytes", printed)]
    assert len(read) == ranks
    assert sum(read) == sum(value.nbytes for value in old.values())
    config = json.loads((tmp_path / "finetuned" / "config.json").read_text())
    assert config["architectures"] == ["T5ForConditionalGeneration"]
    assert (tmp_path / "finetuned" / "generation_config.json").exists()
