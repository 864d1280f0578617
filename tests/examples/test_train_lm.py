"""The language-model example as its user runs it: torchrun, on the CPU, with a model small enough for a few seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_lm.py"
MODEL = {"layers": 2, "width": 64, "heads": 2, "context": 32}
TINY = MODEL | {"batch": 16, "text-bytes": 300_000, "sample-bytes": 20}
STEPS = 40


def command(ranks: int, *flags: object) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    tiny = [f"--{name}={value}" for name, value in TINY.items()]
    return [*torchrun, str(EXAMPLE), *tiny, *map(str, flags)]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(ranks: int, *flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(ranks, *flags), env=environment(), capture_output=True, text=True, timeout=300, check=False)


def train(ranks: int, out: Path, *flags: object) -> str:
    """What a run that must succeed prints."""
    done = run(ranks, "--out", out, "--json", out.with_suffix(".json"), *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a warning, or an error that changed nothing"
    return done.stdout


def records(out: Path) -> dict[int, dict[str, float]]:
    """By step, what the program wrote; of a step that was repeated, the last."""
    return {record["step"]: record for record in map(json.loads, out.with_suffix(".json").read_text().splitlines())}


def numbers(record: dict[str, float]) -> dict[str, float]:
    """The record without what is measured rather than computed."""
    return {name: value for name, value in record.items() if name not in ("tokens_per_s", "peak_gib")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a run on two ranks that nobody stopped, with its checkpoint of half the way."""
    out = tmp_path_factory.mktemp("train_lm") / "uninterrupted"
    return out, train(2, out, "--steps", STEPS, "--checkpoint-every", STEPS // 2, "--eval-every", STEPS // 4)


def test_it_learns_more_than_the_byte_histogram_and_says_so(uninterrupted: tuple[Path, str]) -> None:
    out, printed = uninterrupted
    validations = [record for record in records(out).values() if "validation_bits" in record]
    assert len(validations) == 4
    bits = [record["validation_bits"] for record in validations]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < validations[-1]["histogram_bits"] - 0.2
    assert f"validation {bits[-1]:.3f} bits/byte" in printed
    assert re.search(r"sample:\n\ndef .", printed)


def test_it_leaves_the_last_two_checkpoints_and_nothing_half_written(uninterrupted: tuple[Path, str]) -> None:
    out, printed = uninterrupted
    assert sorted(path.name for path in out.iterdir()) == ["latest", f"step_{STEPS // 2:06d}", f"step_{STEPS:06d}"]
    assert (out / "latest").read_text() == f"step_{STEPS:06d}"
    assert f"checkpoint {out}/step_{STEPS:06d}" in printed


def test_resumed_run_repeats_the_uninterrupted_one_bitwise(uninterrupted: tuple[Path, str], tmp_path: Path) -> None:
    """As after a kill while the second checkpoint was being written: the first is the latest, the second a fragment."""
    reference, _ = uninterrupted
    half, out = STEPS // 2, tmp_path / "resumed"
    (out / "partial").mkdir(parents=True)
    (out / "partial" / "__0_0.distcp").write_bytes(b"a fragment")
    shutil.copytree(reference / f"step_{half:06d}", out / f"step_{half:06d}")
    (out / "latest").write_text(f"step_{half:06d}")

    printed = train(2, out, "--steps", STEPS, "--eval-every", STEPS // 4, "--resume")

    assert f"going on after step {half}" in printed
    expected = {step: numbers(record) for step, record in records(reference).items() if step > half}
    assert {step: numbers(record) for step, record in records(out).items()} == expected
    assert sorted(path.name for path in out.iterdir()) == ["latest", f"step_{half:06d}", f"step_{STEPS:06d}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["flat-adamw", *(pytest.param(name, marks=pytest.mark.full) for name in ("anyprecision", "muon"))]
)
def test_other_optimizers_learn_as_well_and_resume(uninterrupted: tuple[Path, str], tmp_path: Path, optimizer: str) -> None:
    out = tmp_path / optimizer
    flags = ("--optimizer", optimizer, "--eval-every", STEPS // 4, "--checkpoint-every", STEPS // 2)
    train(2, out, "--steps", STEPS, *flags)
    bits = [record["validation_bits"] for record in records(out).values() if "validation_bits" in record]
    adamw = records(uninterrupted[0])
    assert bits[-1] < adamw[STEPS]["histogram_bits"] - 0.2
    if optimizer == "flat-adamw":
        assert {step: numbers(record) for step, record in records(out).items()} == {
            step: numbers(record) for step, record in adamw.items()
        }
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(out / f"step_{STEPS // 2:06d}", again / f"step_{STEPS // 2:06d}")
    (again / "latest").write_text(f"step_{STEPS // 2:06d}")
    train(2, again, "--steps", STEPS, *flags, "--resume")
    expected = {step: numbers(record) for step, record in records(out).items() if step > STEPS // 2}
    assert {step: numbers(record) for step, record in records(again).items()} == expected


@pytest.mark.slow
def test_one_rank_gives_the_losses_of_two(uninterrupted: tuple[Path, str], tmp_path: Path) -> None:
    reference, _ = uninterrupted
    out = tmp_path / "one_rank"
    train(1, out, "--steps", STEPS)
    two_ranks, one_rank = records(reference), records(out)
    for step in range(1, 11):
        assert one_rank[step]["loss"] == pytest.approx(two_ranks[step]["loss"], abs=1e-4)
        assert one_rank[step]["norm"] == pytest.approx(two_ranks[step]["norm"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--optimizer=muon"], ["--optimizer=anyprecision", "--hsdp"]])
def test_an_inspected_run_ends_with_its_peak_beside_the_planned_one_and_a_report(tmp_path: Path, flags: Sequence[str]) -> None:
    done = run(2, *flags, "--inspect", "--steps", 4, "--eval-batches", 1, "--sample-bytes", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"blocks.0 to blocks.1 +2 x FSDPBlock", done.stdout)
    said = re.search(r"peak of a step: ([\d.]+) MiB planned, ([\d.]+) MiB measured", done.stdout)
    assert said is not None
    # When gloo's threads let go of buffers moves the peak of so small a model; tests/planner/test_peak.py holds how close they are.
    assert float(said[1]) == pytest.approx(float(said[2]), rel=0.5)
    assert f"report: {tmp_path}/run/report.html" in done.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size > 1_000_000  # plotly is in it
    assert "the doctor found nothing" in done.stdout
    assert "DoctorWarning" not in done.stderr
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    (line, *_) = map(json.loads, (tmp_path / "run" / "ledger.rank0.jsonl").read_text().splitlines())
    assert kept["plan"]["most"]["optimizer state"] == line["memory"]["optimizer state"]  # the plan knows which optimizer it is


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_from_which_resume_goes_on(tmp_path: Path) -> None:
    """It saves after every step, so that the signal may well arrive while it does."""
    out = tmp_path / "interrupted"
    flags = "--out", out, "--checkpoint-every", 1
    with subprocess.Popen(
        command(2, *flags, "--steps", 100_000), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 10/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    said = re.search(r"interrupted after step (\d+); --resume goes on from the checkpoint (\S+)", rest)
    assert said, rest
    assert process.returncode != 0
    step, checkpoint = int(said[1]), Path(said[2])
    assert checkpoint == out / f"step_{step:06d}"

    resumed = run(2, *flags, "--steps", step + 2, "--resume")

    assert resumed.returncode == 0, resumed.stderr
    assert f"going on after step {step}, from {checkpoint}" in resumed.stdout
    assert (out / "latest").read_text() == f"step_{step + 2:06d}"


@pytest.mark.slow
def test_missing_text_is_one_line_on_stderr(tmp_path: Path) -> None:
    done = run(2, "--out", tmp_path / "out", "--text", tmp_path / "absent")
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if "train_lm: " in line]
    assert own == [f"train_lm: --text: {tmp_path}/absent is neither a file nor a folder with text in it"]
    assert f'File "{EXAMPLE}"' not in done.stderr, "a traceback of ours"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "absent"], r"(\[rank 0\] )?there is no checkpoint in \S+/absent\n"),
        (["--width", "32"], r"is of another model\n  embedding\.weight: \(256, 32\) in the model, \(256, 64\) in the checkpoint"),
        (["--heads", "4"], "the checkpoint is of a model with --layers 2 --width 64 --heads 2 --context 32"),
    ],
)
def test_resume_that_cannot_be_says_why(uninterrupted: tuple[Path, str], flags: Sequence[str], said: str) -> None:
    out, _ = uninterrupted
    before = sorted(out.iterdir())
    done = run(1, "--out", out, "--resume", *flags)
    assert done.returncode != 0
    own = done.stderr[done.stderr.index("train_lm: ") :]
    assert re.match(rf"train_lm: .*{said}", own), done.stderr
    assert f'File "{EXAMPLE}"' not in done.stderr, "a traceback of ours"
    assert sorted(out.iterdir()) == before


# ---- its functions, without a process group -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def train_lm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_text_of_a_folder_is_its_text_files_in_an_order_that_the_names_decide(train_lm: ModuleType, tmp_path: Path) -> None:
    files = {"a.txt": b"one", "deep/b.md": b"two", "picture": b"\x89\0\0", "__pycache__/c.pyc": b"compiled"}
    first = train_lm.read_text(write(tmp_path / "first", files), 1000)
    again = train_lm.read_text(write(tmp_path / "again", dict(reversed(files.items()))), 1000)
    assert first in (b"onetwo", b"twoone")
    assert again == first
    assert train_lm.read_text(tmp_path / "first", 4) == first[:4]
    assert train_lm.read_text(tmp_path / "first" / "a.txt", 1000) == b"one"


def test_default_text_is_bounded_python(train_lm: ModuleType) -> None:
    text = train_lm.read_text(None, 100_000)
    assert len(text) == 100_000
    assert text.count(b"import ") > 10


@pytest.mark.parametrize("files", [{}, {"empty": b""}, {"picture": b"\x89\0\0"}])
def test_folder_without_text_is_an_error_that_names_it(train_lm: ModuleType, tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(train_lm.UserError, match=str(tmp_path)):
        train_lm.read_text(write(tmp_path, files), 1000)


def test_histogram_of_four_equally_frequent_bytes_has_two_bits(train_lm: ModuleType) -> None:
    assert train_lm.histogram_bits(torch.tensor([7, 8, 9, 10] * 5, dtype=torch.uint8)) == pytest.approx(2.0)


def test_learning_rate_warms_up_then_falls_to_a_tenth(train_lm: ModuleType) -> None:
    args = Namespace(lr=1.0, steps=100)
    rates = [train_lm.learning_rate(step, args) for step in range(1, 101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
