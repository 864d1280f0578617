"""``fsdp2 migrate --parity``: the old script and the rewritten one run for a few steps; the first difference is shown with its place.

Both run on CPU processes (gloo), also a script that asks for GPUs and NCCL (``on_cpu.py``). Compared are, at each optimizer
step and in this order: the loss of every rank, the norm of the gradients, each whole parameter. A run that takes too long is ended, and
counts as a difference. It refuses to know torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .files import imported_names, migrate_files
from .working_copy import working_copies


@dataclass(frozen=True)
class Run:
    """What the processes of one side wrote: by rank, then by step."""

    folder: Path
    status: int
    said: str
    ranks: list[list[dict[str, Any]]]
    hangs: str = ""  # where, and what it printed last, if it was ended because it took too long

    @property
    def num_steps(self) -> int:
        return min((len(steps) for steps in self.ranks), default=0)


def compare(
    script: Path, arguments: list[str], num_steps: int, num_ranks: int, tolerance: float, timeout: float, in_place: bool = False
) -> int:
    """0: the same within ``tolerance``; 1: different, or a side failed, or nothing was recorded. Says which, and where.

    timeout:  seconds that each side may take
    in_place: both run in the current folder, not each in a copy of it
    """
    if not timeout > 0:
        raise ArgumentError(f"--timeout is {timeout:g}", expected="seconds, more than 0", fix="for instance --timeout 600")
    if not script.is_file():
        raise ArgumentError(f"--parity: there is no file {script}", expected="a Python script", fix="check the path")
    with tempfile.TemporaryDirectory(prefix="fsdp2_parity_") as name:
        folder = Path(name)
        overlay = folder / "overlay"
        overlay.mkdir()
        new_source, listing = _rewrite(script, overlay)
        sys.stdout.writelines(listing)
        if new_source is None:
            sys.stdout.write(f"{script}: nothing to migrate\n")
            return 0
        places = {
            side: (Path.cwd(), script) if in_place else working_copies(script, folder / f"{side} copy") for side in ("old", "new")
        }
        old = _run(folder / "old", script, places["old"], folder, arguments, num_steps, num_ranks, timeout)
        found = _failure("old", old)
        if not found:
            new = _run(folder / "new", new_source, places["new"], overlay, arguments, num_steps, num_ranks, timeout)
            found = _failure("new", new) or first_difference(old, new, tolerance)
    if found:
        sys.stdout.write(f"{script}: different: {found}\n")
        return 1
    sys.stdout.write(f"{script}: the same for {old.num_steps} steps on {num_ranks} ranks: losses, gradient norms, parameters\n")
    return 0


def _rewrite(script: Path, overlay: Path) -> tuple[Path | None, list[str]]:
    """Rewritten copies of the script and of the modules beside it, and what the migration says."""
    results = migrate_files(each for each in sorted(script.resolve().parent.glob("*.py")) if _may_matter(each, script))
    listing = []
    changed = False
    for path, result in results.items():
        if result.new != result.old:
            changed = True
            (overlay / path.name).write_text(result.new)
        listing += [f"{finding.shown(path.name)}\n" for finding in result.findings]
    own = overlay / script.name
    if changed and not own.exists():
        own.write_text(script.read_text())
    return (own if changed else None), listing


def _may_matter(path: Path, script: Path) -> bool:
    return path.name == script.name or path.stem in imported_names(script.read_text())


def _run(
    folder: Path,
    source: Path,
    runs_as: tuple[Path, Path],
    overlay: Path,
    arguments: list[str],
    num_steps: int,
    num_ranks: int,
    timeout: float,
) -> Run:
    """runs_as: the current folder of the run, and the file that ``source`` is taken for"""
    folder.mkdir()
    here, claimed = runs_as
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    probe = ["-m", "fsdp2.migrate.probe", str(folder), str(num_steps), str(timeout), str(source.resolve()), str(claimed), str(overlay)]
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    printed, said = folder / "stdout", folder / "stderr"
    with printed.open("wb") as stdout, said.open("wb") as stderr:
        # Not the terminal's input: a script that waits for some would wait for ever.
        command = [*torchrun, *probe, *arguments]
        process = subprocess.Popen(command, cwd=here, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        is_late = _ends_late(process, timeout)
    ranks = []
    for rank in range(num_ranks):
        file = folder / f"rank{rank}.jsonl"
        ranks.append([json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [])
    stacks = {rank: file.read_text() for rank in range(num_ranks) if (file := folder / f"rank{rank}.stack").exists()}
    hangs = ""
    if is_late or any(stack.startswith("Timeout") for stack in stacks.values()):
        places = [f"rank {rank} is in {place}" for rank, stack in stacks.items() if (place := _place(stack, claimed))]
        last = [line.strip() for line in printed.read_text(errors="replace").splitlines() if line.strip()]
        where = "; ".join(places) or "it has not come to the script yet, or left it"
        output = f"last output: {' | '.join(last[-3:])}" if last else "it has printed nothing"
        hangs = f"had not ended after {timeout:g} s (--timeout): {where}; {output}"
    return Run(folder, process.returncode, said.read_text(errors="replace"), ranks, hangs)


_GRACE_S = 60
"""The ranks end themselves at the time limit, which they know from the moment at which they have imported torch. This is for those that
can't, torchrun itself first of all."""


def _ends_late(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for ``process``; end it, and let it end its ranks, if it is not done long after the time limit."""
    try:
        process.wait(timeout + _GRACE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return True
    except BaseException:
        process.terminate()
        raise
    return False


def _place(stack: str, script: Path) -> str:
    """The innermost line of the script, or of a file beside it, in what ``faulthandler`` wrote; else the innermost of all."""
    frames = [(Path(file), line) for file, line in re.findall(r'File "(.*)", line (\d+) in', stack)]
    own = [frame for frame in frames if frame[0].parent in (script.parent, script.resolve().parent)]
    return next((f"{file.name}:{line}" for file, line in own or frames), "")


def _failure(which: str, run: Run) -> str:
    """Why a side has nothing to compare. A script that fails after some steps is compared up to there by ``first_difference``."""
    if run.hangs:
        return f"the {which} script {run.hangs}; it had taken {run.num_steps} steps"
    if run.num_steps:
        return ""
    if run.status == 0:
        return f"the {which} script took no optimizer step"
    lines = [line for line in run.said.splitlines() if "Error" in line and "torch.distributed.elastic" not in line]
    errors = [line for line in lines if "Error: " in line] or lines  # before lines that raise it
    return f"the {which} script failed before its first step: {errors[0].strip() if errors else run.said.strip()[-500:]}"


def first_difference(old: Run, new: Run, tolerance: float) -> str:
    """The first place where two runs differ by more than ``tolerance``, relative; "" if there is none."""
    import torch

    for step in range(min(old.num_steps, new.num_steps)):
        place = f"step {step + 1}"
        for rank, (before, after) in enumerate(zip(old.ranks, new.ranks, strict=True)):
            losses, others = before[step]["losses"], after[step]["losses"]
            if len(losses) != len(others):
                return f"{place}, rank {rank}: {len(losses)} backward passes, and {len(others)} in the new script"
            for index, (mine, other) in enumerate(zip(losses, others, strict=True)):
                if not _close(mine, other, tolerance):
                    return f"{place}, rank {rank}: loss {index + 1} is {mine:.8g}, and {other:.8g} in the new script"
        norm, other_norm = old.ranks[0][step]["norm"], new.ranks[0][step]["norm"]
        if not _close(norm, other_norm, tolerance):
            return f"{place}: the gradient norm is {norm:.8g}, and {other_norm:.8g} in the new script"
        params = torch.load(old.folder / f"step{step + 1}.pt", weights_only=True)
        others = torch.load(new.folder / f"step{step + 1}.pt", weights_only=True)
        for name in [*params, *(each for each in others if each not in params)]:
            found = _parameter_difference(params.get(name), others.get(name), tolerance)
            if found:
                return f"after {place}: parameter {name}: {found}"
    if old.num_steps != new.num_steps:
        return f"the old script took {old.num_steps} steps, the new one {new.num_steps}: {_last_error(old) or _last_error(new)}"
    return ""


def _last_error(run: Run) -> str:
    return next((line.strip() for line in run.said.splitlines() if "Error:" in line), "")


def _close(mine: float, other: float, tolerance: float) -> bool:
    if math.isnan(mine) or math.isnan(other):
        return math.isnan(mine) and math.isnan(other)
    return mine == other or abs(mine - other) <= tolerance * max(abs(mine), abs(other), 1e-6)


def _parameter_difference(mine: Any, other: Any, tolerance: float) -> str:
    if mine is None or other is None:
        return f"is only in the {'new' if mine is None else 'old'} model"
    if mine.shape != other.shape:
        return f"has shape {tuple(mine.shape)}, and {tuple(other.shape)} in the new script"
    if not mine.numel():
        return ""
    difference = (mine.double() - other.double()).abs()
    bound = tolerance * max(float(mine.double().abs().max()), 1e-2)
    worst = int(difference.argmax())
    if float(difference.max()) <= bound:
        return ""
    return f"differs by up to {float(difference.max()):.3g}, at element {worst} ({float(mine.flatten()[worst]):.8g})"
