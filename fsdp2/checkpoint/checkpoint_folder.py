"""A folder of checkpoints, of which one is the latest: complete ones only have their names, whatever crashes when.

    runs/a/latest          one line, "step_000200"; replaced in one rename
    runs/a/step_000100/    complete
    runs/a/step_000200/    complete
    runs/a/partial/        being written, or being removed, or what a crash left of either; the next save removes it

A checkpoint is written as ``partial``, renamed when it is complete, and then named in ``latest``. One is removed by renaming it to
``partial`` first. So what is named is whole at every moment. One run at a time may write to a folder. It refuses to know what is
in a checkpoint, and other ranks.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .safe_dcp import METADATA

_NAME = re.compile(r"step_(\d+)(?:_(\d+))?")


class CheckpointFolder:
    """For rank 0. ``keep_last``: how many checkpoints stay, None for all."""

    def __init__(self, path: Path, keep_last: int | None) -> None:
        self.path = path
        self.partial = path / "partial"
        self._pointer = path / "latest"
        self._keep_last = keep_last

    def checkpoints(self) -> list[Path]:
        """The complete ones, oldest first, by the time of their writing."""
        found = [each for each in self.path.glob("step_*") if _NAME.fullmatch(each.name) and (each / METADATA).is_file()]
        return sorted(found, key=lambda each: ((each / METADATA).stat().st_mtime_ns, _order(each)))

    def latest(self) -> Path | None:
        """What ``latest`` names; if that is gone, the newest of the others."""
        if self._pointer.is_file():
            named = self.path / self._pointer.read_text().strip()
            if named.parent == self.path and _NAME.fullmatch(named.name) and (named / METADATA).is_file():
                return named
        return next(reversed(self.checkpoints()), None)

    def begin(self) -> None:
        """Make an empty ``partial``."""
        self.discard()
        self.partial.mkdir(parents=True)

    def discard(self) -> None:
        """Remove ``partial``, if there is one."""
        if self.partial.exists():
            shutil.rmtree(self.partial)

    def commit(self, step: int) -> Path:
        """Name the complete ``partial``, and make it the latest."""
        final = self.path / f"step_{step:06d}"
        number = 1
        while final.exists():  # of another run in this folder, or from before a resume; perhaps it is the latest
            number += 1
            final = self.path / f"step_{step:06d}_{number}"
        _sync(self.partial)
        self.partial.rename(final)
        _sync(self.path)
        written = self.path / "latest.partial"
        with written.open("w") as file:
            file.write(final.name)
            file.flush()
            os.fsync(file.fileno())
        written.replace(self._pointer)
        _sync(self.path)
        return final

    def prune(self) -> None:
        """Remove all but the last ``keep_last``; never the latest."""
        if self._keep_last is None:
            return
        latest = self.latest()
        others = [each for each in self.checkpoints() if each != latest]
        for old in others[: max(len(others) + 1 - self._keep_last, 0)]:
            self.discard()
            old.rename(self.partial)
        self.discard()


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _sync(folder: Path) -> None:
    """Have renames in ``folder`` survive a power failure, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
