"""Run checks in processes of their own, so that one that crashes or hangs is a failed row, and those behind it are run all the same.

Checks of one setup share their processes, one after another, until one fails; new processes go on behind it. The ranks write a line
when a check begins and one when it ends (``worker.py``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from gpu.check import PLAYED, Check, Setup
from gpu.device import count

START_TIMEOUT_S = 120.0
GRACE_S = 5.0  # for the other ranks, once one has failed
NOT_STARTED = "no check of this setup was run"
OUT_OF_TIME = "needs more time than the budget: --budget MINUTES"
OUTPUT_LIMIT = 4000  # characters of a row
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """What came of one check. text: why it failed, with what it printed, or what is missing; kind: what the check's rows all show"""

    name: str
    title: str
    part: int
    status: Literal["pass", "fail", "skip"]
    seconds: float = 0.0
    text: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""


def run_all(
    checks: Sequence[Check], device: str, tell: Callable[[Row], None] = lambda row: None, budget_s: float = math.inf
) -> list[Row]:
    """All checks, in their order. tell: is given each row when there is one; budget_s: what would begin later is skipped"""
    rows = []
    end = time.monotonic() + budget_s
    for setup, those in groupby(checks, key=lambda each: each.setup):
        for row in _run_setup(list(those), setup, device, end):
            rows.append(row)
            tell(row)
    return rows


def _run_setup(checks: list[Check], setup: Setup, device: str, end: float) -> Iterator[Row]:
    available = count(device)
    ranks = 1 if setup.backend in PLAYED else setup.ranks or available
    missing = None
    if setup.ranks == 0 and available < 2:
        missing = f"several devices: here is {available}"
    elif ranks > available:
        missing = f"{ranks} devices: here are {available}"
    elif setup.sanitizer and device != "cuda":
        missing = "CUDA: its sanitizer"
    if missing is not None:
        yield from (Row(each.name, each.title, each.part, "skip", text=f"needs {missing}", kind=each.kind) for each in checks)
        return
    left = checks
    while left:
        last = None
        if time.monotonic() > end:
            yield from (Row(each.name, each.title, each.part, "skip", text=OUT_OF_TIME, kind=each.kind) for each in left)
            return
        for last in _run_batch(left, setup, ranks, device):
            left = left[1:]
            yield last
            if time.monotonic() > end:
                break
        if last is not None and last.text.startswith(NOT_STARTED):
            yield from (_replace(last, name=each.name, title=each.title, kind=each.kind, seconds=0.0) for each in left)
            return


def _run_batch(checks: list[Check], setup: Setup, ranks: int, device: str) -> Iterator[Row]:
    """Rows of at least one of ``checks``, from the first: the last of them fails unless all were run."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-gpu-") as name:
        folder = Path(name)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS.parent), str(TESTS), environment.get("PYTHONPATH"))))
        environment.setdefault("OMP_NUM_THREADS", "1")
        if setup.sanitizer:
            environment["TORCH_CUDA_SANITIZER"] = "1"
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                with (folder / f"{rank}.log").open("wb") as log:
                    command = [sys.executable, "-m", "gpu.worker", device, str(rank), str(ranks), name, *(each.name for each in checks)]
                    started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
            for each in checks:
                row = _await(each, started, folder)
                yield row
                if row.status == "fail":
                    return
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _await(check: Check, processes: list[subprocess.Popen[bytes]], folder: Path) -> Row:
    """Wait until all ranks have ended ``check``, one has failed, or the time is up, which counts from when a rank begins."""
    began = time.monotonic()
    deadline = began + START_TIMEOUT_S + check.timeout_s
    has_begun = False
    ends: dict[int, dict[str, Any]] = {}
    failed_at = None
    while len(ends) < len(processes):
        for rank, process in enumerate(processes):
            if rank in ends:
                continue
            code = process.poll()
            lines = [line for line in _lines(folder, rank) if line["check"] == check.name]
            if lines and not has_begun:
                has_begun, deadline = True, time.monotonic() + check.timeout_s
            line = next((line for line in lines if line["status"] != "begin"), None)
            if line is None and code is not None:
                started = any(line["status"] == "begin" for line in _lines(folder, rank))
                line = {"status": "fail", "at": time.time(), "text": _death(code) if started else f"{NOT_STARTED}: {_death(code)}"}
            if line is not None:
                ends[rank] = line
                if line["status"] == "fail" and failed_at is None:
                    failed_at = time.monotonic()
        now = time.monotonic()
        if now > deadline or (failed_at is not None and now > failed_at + GRACE_S):
            break
        time.sleep(0.05)
    seconds = time.monotonic() - began
    row = Row(check.name, check.title, check.part, "pass", seconds, kind=check.kind)
    failed = {rank: end for rank, end in ends.items() if end["status"] == "fail"}
    if failed:
        rank = min(failed, key=lambda each: failed[each]["at"])  # the others fail because they have lost it
        text = failed[rank]["text"]
        where = "" if text.startswith(NOT_STARTED) else f"rank {rank}: "
        return _replace(row, status="fail", text=f"{where}{text}\n{_output(folder, rank)}".strip())
    if len(ends) < len(processes):
        rank = min(set(range(len(processes))) - set(ends))
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)  # it prints its stacks
            time.sleep(1)
        return _replace(row, status="fail", text=f"rank {rank} did not end within {check.timeout_s:g} s\n{_output(folder, rank)}")
    skipped = [end for end in ends.values() if end["status"] == "skip"]
    if skipped:
        return _replace(row, status="skip", text=f"needs {skipped[0]['text']}")
    return _replace(row, seconds=ends[0]["seconds"], figures=ends[0]["figures"])


def _replace(row: Row, **changes: Any) -> Row:
    return Row(**{**vars(row), **changes})


def _lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{rank}.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _death(code: int) -> str:
    return f"the process ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended with exit code {code}"


def _output(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.log").read_text(errors="replace")[-OUTPUT_LIMIT:].strip()


__all__ = ["Row", "run_all"]
