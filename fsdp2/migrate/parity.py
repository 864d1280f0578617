"""``fsdp2 migrate --parity``: the old script and the rewritten one run for a few steps; the first difference is shown with its place.

Both run on CPU processes (gloo), also a script that asks for GPUs and NCCL (``on_cpu.py``). Compared at each optimizer
step, in this order: the loss of every rank, the norm of the gradients, each whole gradient and parameter
(``differences.py``). Each side runs in a copy of the script's folders, so that no save harms the user's files, and no
side resumes from the other's. A run that takes too long is ended, and counts as a difference.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from ..errors import ArgumentError
from ..printable import say
from ..ranks import run_ranks
from .differences import Run, first_difference
from .files import imported_names, migrate_files
from .probe import Side

MAX_NBYTES = 2 << 30
_LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".venv*", "venv", "*.egg-info", ".*_cache", "node_modules")


def compare(
    script: Path, arguments: list[str], num_steps: int, num_ranks: int, tolerance: float | None, timeout: float, in_place: bool = False
) -> int:
    """0: the same within ``tolerance``; 1: different, or a side failed, or nothing was recorded. Says which, and where.

    timeout:  seconds that each side may take
    in_place: both sides run in the current folder, not each in a copy of it
    """
    if not script.is_file():
        raise ArgumentError(f"--parity: there is no file {script}", expected="a Python script", fix="check the path")
    with tempfile.TemporaryDirectory(prefix="fsdp2_parity_") as name:
        folder = Path(name)
        overlay = folder / "overlay"
        overlay.mkdir()
        new_source = _rewrite(script, overlay)
        if new_source is None:
            say(f"{script}: nothing to migrate")
            return 0
        places = {
            side: (Path.cwd(), script) if in_place else _working_copies(script, folder / f"{side} copy") for side in ("old", "new")
        }

        def run(side: str, source: Path) -> Run:
            here, claimed = places[side]
            run_by = Side(num_steps, source.resolve(), claimed, overlay if side == "new" else folder, tuple(arguments))
            return _run(run_by, folder / side, here, num_ranks, timeout)

        old = run("old", script)
        found = _failure("old", old)
        if not found:
            new = run("new", new_source)
            found = _failure("new", new) or first_difference(old, new, tolerance)
    if found:
        say(f"{script}: different: {found}")
        return 1
    say(f"{script}: the same for {old.num_steps} steps on {num_ranks} ranks: losses, gradients, parameters")
    return 0


def _rewrite(script: Path, overlay: Path) -> Path | None:
    """Write rewritten copies of the script and of the modules next to it that it imports; prints the findings."""
    imported = imported_names(script.read_text())
    siblings = sorted(script.resolve().parent.glob("*.py"))
    results = migrate_files(path for path in siblings if path.name == script.name or path.stem in imported)
    changed = False
    for path, result in results.items():
        if result.new != result.old:
            changed = True
            (overlay / path.name).write_text(result.new)
        sys.stdout.writelines(f"{finding.shown(path.name)}\n" for finding in result.findings)
    own = overlay / script.name
    if changed and not own.exists():
        own.write_text(script.read_text())
    return own if changed else None


def _working_copies(script: Path, side: Path) -> tuple[Path, Path]:
    """Copy the current folder below ``side``, and the script's own if it is elsewhere: the copied current folder, the copied script."""
    here, script = Path.cwd(), script.resolve()
    folder = _copied(here, side / "here")
    if script.is_relative_to(here):
        return folder, folder / script.relative_to(here)
    return folder, _copied(script.parent, side / "there") / script.name


def _copied(source: Path, target: Path) -> Path:
    """Raises: ArgumentError if there is more to copy than ``MAX_NBYTES``."""
    nbytes = 0

    def ignored(folder: str, names: list[str]) -> set[str]:
        nonlocal nbytes
        left_out = _LEFT_OUT(folder, names)
        files = (Path(folder) / name for name in {*names} - left_out)
        nbytes += sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
        if nbytes > MAX_NBYTES:
            raise ArgumentError(
                f"--parity: {source} has more than {MAX_NBYTES >> 20} MiB, and each of the two runs gets a copy",
                expected=f"at most {MAX_NBYTES >> 20} MiB",
                fix="go to a folder with only the files that the script needs, or pass --in-place to run in the folder itself",
            )
        return left_out

    shutil.copytree(source, target, symlinks=True, ignore=ignored, ignore_dangling_symlinks=True)
    return target


def _run(side: Side, folder: Path, here: Path, num_ranks: int, timeout: float) -> Run:
    """here: the current folder of the run"""
    folder.mkdir()
    ended = run_ranks(num_ranks, lambda rank: side.run(folder), limit_s=timeout, cwd=here)
    files = [folder / f"rank{rank}.jsonl" for rank in range(num_ranks)]
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]
    hangs = ""
    if ended.is_late:
        places = [f"rank {each.rank} is in {place}" for each in ended if (place := _place(each.stack, side.claimed))]
        last = [line.strip() for each in ended for line in each.output.splitlines()[-3:] if line.strip()]
        where = "; ".join(places) or "no rank is inside the script"
        output = f"last output: {' | '.join(last)}" if last else "it has printed nothing"
        hangs = f"had not ended after {timeout:g} s (--timeout): {where}; {output}"
    first = ended.first_failed
    return Run(folder, ended.status, first.output if first else "", ranks, hangs)


def _place(stack: str, script: Path) -> str:
    """The innermost line of the script, or of a file next to it, in a stack that ``faulthandler`` wrote; else the innermost of all."""
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
    lines = [line for line in run.said.splitlines() if "Error" in line]
    errors = [line for line in lines if "Error: " in line] or lines  # before lines that raise it
    return f"the {which} script failed before its first step: {errors[0].strip() if errors else run.said.strip()[-500:]}"
