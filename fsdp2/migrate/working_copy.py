"""Copies of the folders that a script runs in, for each side of ``--parity``.

What a script saves there harms nobody's files, and no side resumes from what the other has saved.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from pathlib import Path

from ..errors import ArgumentError

MAX_NBYTES = 2 << 30
_LEFT_OUT = (".git", "__pycache__", ".venv*", "venv", "*.egg-info", ".*_cache", "node_modules")


def working_copies(script: Path, side: Path) -> tuple[Path, Path]:
    """Copy the current folder below ``side``, and the script's own if it is elsewhere: the copied current folder, the copied script.

    Raises: ArgumentError if there is more to copy than ``MAX_NBYTES``
    """
    here, script = Path.cwd(), script.resolve()
    folder = _copied(here, side / "here")
    if script.is_relative_to(here):
        return folder, folder / script.relative_to(here)
    return folder, _copied(script.parent, side / "there") / script.name


def _copied(source: Path, target: Path) -> Path:
    nbytes = sum(_nbytes(Path(folder) / name) for folder, name in _files_in(source))
    if nbytes > MAX_NBYTES:
        raise ArgumentError(
            f"--parity: {source} has {nbytes >> 20} MiB, and each of the two runs gets a copy",
            expected=f"at most {MAX_NBYTES >> 20} MiB",
            fix="go to a folder that has only what the script needs, or pass --in-place, and both runs write where the script writes",
        )
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT), ignore_dangling_symlinks=True)
    return target


def _files_in(source: Path) -> list[tuple[str, str]]:
    found = []
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if not any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_OUT)]
        found += [(folder, name) for name in files]
    return found


def _nbytes(path: Path) -> int:
    return 0 if path.is_symlink() or not path.exists() else path.stat().st_size
