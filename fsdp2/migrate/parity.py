"""``fsdp2 migrate --parity``: the old script and the rewritten one run for a few steps; the first difference is shown with its place.

Both run on CPU processes (gloo), also a script that asks for GPUs and NCCL (``on_cpu.py``). Compared are, at each optimizer step and in
this order: the loss of every rank, the norm of the gradients, each whole gradient and parameter (``differences.py``). A run that takes
too long is ended, and counts as a difference.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import ArgumentError
from ..printable import say
from ..run import command_of_ranks, environment_of_ranks
from .differences import Run, first_difference
from .files import imported_names, migrate_files
from .working_copy import working_copies


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
        new_source, listing = _rewrite(script, overlay)
        sys.stdout.writelines(listing)
        if new_source is None:
            say(f"{script}: nothing to migrate")
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
        say(f"{script}: different: {found}")
        return 1
    say(f"{script}: the same for {old.num_steps} steps on {num_ranks} ranks: losses, gradients, parameters")
    return 0


def _rewrite(script: Path, overlay: Path) -> tuple[Path | None, list[str]]:
    """Rewritten copies of the script and of the modules next to it, and what the migration says."""
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
    probe = ["-m", "fsdp2.migrate.probe", str(folder), str(num_steps), str(timeout), str(source.resolve()), str(claimed), str(overlay)]
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = environment_of_ranks(hides_devices=True) | {"PYTHONPATH": path}
    printed, said = folder / "stdout", folder / "stderr"
    with printed.open("wb") as stdout, said.open("wb") as stderr:
        # Not the terminal's input: a script that waits for some would wait for ever.
        command = command_of_ranks(num_ranks, *probe, *arguments)
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
    """The innermost line of the script, or of a file next to it, in what ``faulthandler`` wrote; else the innermost of all."""
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
