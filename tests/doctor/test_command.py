"""``fsdp2 doctor`` on scripts as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
fully_shard(model)
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
for step in range(1000):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("was not stopped")
"""


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "fsdp2", "doctor", *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_script_is_stopped_after_its_steps_and_its_faults_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = doctor("--strict", str(script), "--", "--lr", "0.1")
    assert done.returncode != 0
    assert "was not stopped" not in done.stderr, done.stderr
    assert "optimizer-misses-parameters (ranks 0, 1)" in done.stdout, done.stderr
    assert "1.weight, 1.bias" in done.stdout
    assert "same-data-on-every-rank (ranks 0, 1)" in done.stdout
    assert "fsdp2 doctor: 3 steps" in done.stdout
    script.write_text(SCRIPT.replace("optimizer.zero_grad()", "optimizer.zero_grad(); print(step)"))
    done = doctor("--json", str(script), "--", "--lr", "0.1")
    seen = json.loads(done.stdout)
    assert (seen["steps"], seen["has_looked"]) == (3, True)
    assert "optimizer-misses-parameters" in [each["check"] for each in seen["findings"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "found"),
    [
        (
            "optimizer.zero_grad()\n    if step == 1 and dist.get_rank() == 1: raise ValueError('bad batch')",
            "optimizer-misses-parameters",
        ),
        ("raise ValueError('bad batch')", "on-meta-device"),
    ],
)
def test_a_script_that_fails_is_not_the_end_of_what_was_found(tmp_path: Path, fails: str, found: str) -> None:
    """In its second step on one rank, behind a check; and in its first forward, on all ranks, where each looks alone."""
    text = SCRIPT.replace("optimizer.zero_grad()", fails)
    if found == "on-meta-device":
        text = SCRIPT.replace("fully_shard(model)", "fully_shard(model.to('meta'))")
    script = tmp_path / "train.py"
    script.write_text(text)
    done = doctor(str(script), "--", "--lr", "0.1")
    assert done.returncode != 0
    assert done.stdout.count("fsdp2 doctor: ") == 1, done.stdout + done.stderr
    error = "FSDP parameters should be materialized" if found == "on-meta-device" else "ValueError: bad batch"
    assert error in done.stderr
    assert done.stdout.count("the script failed on rank") == 1
    assert error in done.stdout
    assert found in done.stdout


MODEL = """
import os, signal, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
{shard}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
def train():
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SHARDED, PLAIN = "fully_shard(model)", ""
NOTHING = "the doctor found nothing"

ENDS = {
    "by_os_exit": (SHARDED, "train()\nos._exit(0)", 0, ["1 steps", NOTHING]),
    "by_sys_exit": (SHARDED, "train()\nsys.exit(3)", 1, ["1 steps", "the script ended on rank", "with status 3"]),
    "by_a_signal_on_one_rank": (
        SHARDED,
        "train()\nif dist.get_rank() == 1: os.kill(os.getpid(), 9)\nsignal.pause()",
        1,
        ["1 steps", "a signal, or code other than Python's, ended the script on"],
    ),
    "with_the_rank_unset": (SHARDED, "del os.environ['RANK']\nfor _ in range(9): train()", 0, ["3 steps", NOTHING]),
    "with_its_output_closed": (SHARDED, "sys.stdout.close()\nsys.stdout = open(os.devnull, 'w')\ntrain()", 0, ["1 steps", NOTHING]),
    "catching_every_exception": (
        SHARDED,
        "while True:\n    try: train()\n    except BaseException: pass",
        0,
        ["3 steps", NOTHING],
    ),
    "before_any_step": (SHARDED, "model(torch.randn(2, 4))", 1, ["no torch.optim.Optimizer that has its parameters has stepped"]),
    "training_what_is_not_sharded": (PLAIN, "train()", 1, ["none of its parameters are sharded"]),
    "without_training": (PLAIN, "", 1, ["no optimizer has stepped on a model that fully_shard was called on"]),
}
ENDS_IN_CI = {"by_os_exit", "by_a_signal_on_one_rank", "training_what_is_not_sharded"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [how if how in ENDS_IN_CI else pytest.param(how, marks=pytest.mark.full) for how in ENDS])
def test_however_a_script_ends_the_doctor_says_what_it_has_seen(tmp_path: Path, how: str) -> None:
    shard, ending, status, said = ENDS[how]
    script = tmp_path / "train.py"
    script.write_text(MODEL.format(shard=shard) + ending)
    done = doctor(str(script))
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count("fsdp2 doctor: ") == 1, done.stdout + done.stderr
    for words in said:
        assert words in done.stdout, done.stdout + done.stderr


ON_RANK_0 = """
while True:
    model(torch.randn(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        {clip}
        optimizer.step()
    optimizer.zero_grad()
"""
APART = {
    "step": ("pass", "step-on-some-ranks (rank 1): rank 0 has come to optimizer.step(), and rank 1 will not"),
    "clip_and_step": ("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "ranks-apart (ranks 0, 1)"),
    "endless": ("import time; time.sleep(1000)", "ranks-apart (ranks 0, 1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", *(pytest.param(how, marks=pytest.mark.full) for how in APART if how != "step")])
def test_what_one_rank_does_alone_is_named_and_nothing_hangs(tmp_path: Path, how: str) -> None:
    """It aborted, or hung without limit."""
    alone, said = APART[how]
    script = tmp_path / "train.py"
    script.write_text(MODEL.format(shard=SHARDED) + ON_RANK_0.format(clip=alone))
    limit = ["--limit", "30"] if how == "endless" else ["--timeout", "5"]
    done = doctor(*limit, str(script))
    assert done.returncode != 0
    assert said in done.stdout, done.stdout + done.stderr
    if how != "step":
        assert "rank 0 was at train.py:" in done.stdout
    assert done.stdout.count("fsdp2 doctor: ") == 1


@pytest.mark.slow
def test_two_models_with_an_optimizer_each_are_healthy(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    second = """
other = nn.Linear(4, 1)
fully_shard(other)
others = torch.optim.Adam(other.parameters(), lr=0.1)
for _ in range(9):
    other(model(torch.randn(2, 4)).detach()).sum().backward()
    others.step()
    others.zero_grad()
    train()
"""
    script.write_text(MODEL.format(shard=SHARDED) + second)
    done = doctor("--strict", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert NOTHING in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("optimizers", ["two", pytest.param("one", marks=pytest.mark.full)])
def test_a_forgotten_root_is_found_and_its_parameters_are_not_dead(tmp_path: Path, optimizers: str) -> None:
    script = tmp_path / "train.py"
    second = "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)\nother = torch.optim.SGD(model[1].parameters(), lr=0.1)\n"
    train = "for _ in range(9):\n    train()\n" + ("    other.step()\n" if optimizers == "two" else "")
    script.write_text(MODEL.format(shard="fully_shard(model[0])") + (second if optimizers == "two" else "") + train)
    done = doctor(str(script))
    assert "[error] never-averaged (ranks 0, 1)" in done.stdout, done.stdout + done.stderr
    assert "1.weight, 1.bias" in done.stdout
    assert done.stdout.count("[error]") + done.stdout.count("[warning]") == 1, done.stdout


@pytest.mark.slow
def test_a_module_of_a_package_is_run_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "recipes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("WIDTH = 4\n")
    (package / "train.py").write_text(f"from .sizes import WIDTH\n{MODEL.format(shard=SHARDED)}train()\nassert WIDTH == 4")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "fsdp2", "doctor", "-m", "recipes.train"]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert NOTHING in done.stdout


TINY = ["--layers=2", "--width=64", "--heads=2", "--context=32", "--text-bytes=300000"]
HEALTHY = [
    ("train_lm.py", 2, ["--out={}", *TINY]),
    ("tutorial/step3_stop_and_resume.py", 2, ["--folder={}"]),
]
MORE_HEALTHY = [
    *(("train_lm.py", 2, ["--out={}", *TINY, f"--optimizer={name}"]) for name in ("flat-adamw", "anyprecision", "muon")),
    ("train_lm.py", 2, ["--out={}", *TINY, "--hsdp"]),
    ("finetune_hf.py", 2, ["--out={}", "--pairs=80", "--input-length=40", "--width=32", "--batch=8"]),
    ("tutorial/step2_large_models.py", 2, []),
    ("tutorial/step4_many_hosts.py", 2, []),
    ("clients/experts.py", 4, []),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "ranks", "flags"), [*HEALTHY, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_HEALTHY)]
)
def test_the_examples_have_no_finding(tmp_path: Path, example: str, ranks: int, flags: list[str]) -> None:
    flags = [flag.format(tmp_path) for flag in flags]
    done = doctor("--strict", f"--ranks={ranks}", str(ROOT / "examples" / example), "--", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the doctor found nothing" in done.stdout


def test_a_script_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from fsdp2.cli import main

    assert main(["doctor", "absent.py"]) == 2
    assert "fsdp2 doctor: " in capsys.readouterr().err
