"""A folder of checkpoints, of which one is the latest: only complete checkpoints have their names, at whichever moment a job crashes.

    runs/a/latest          one line, "step_000200"; replaced in one rename
    runs/a/step_000100/    complete
    runs/a/step_000200/    complete
        runs/a/partial_1f0c/   being written or removed, or left by a crash; the next save removes it
        runs/a/.lock           held by the run that writes here

``CheckpointFolder`` writes a checkpoint as ``partial_...``, renames it when it is complete, and then names it in ``latest``. It removes
a checkpoint by renaming it to such a name first. So a checkpoint with a name is whole at every moment. One run at a time writes to a
folder, from its first save until it is closed or dead. Every incomplete folder has a name of its own, so that two runs do not meet even
where the file system has no locks, nor do two checkpointers of one process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from pathlib import Path

from ..durable import replaced_file, sync_folder
from . import folder_lock
from .dcp_files import METADATA
from .failure import failure

_PARTIAL = re.compile(r"partial(_[0-9a-f]{32})?|latest(_[0-9a-f]{32})?\.partial")
_NAME = re.compile(r"step_(\d+)(?:_(\d+))?")
_being_written: set[str] = set()
"""Partial folders and pointers that this process writes: another ``CheckpointFolder`` of the process must not remove them."""


def is_partial(name: str) -> bool:
    """Whether a folder of that name is no checkpoint: it is being written or removed, or a crash has left it."""
    return _PARTIAL.fullmatch(name) is not None


class CheckpointFolder:
    """For rank 0. keep_last: how many checkpoints stay; None for all"""

    def __init__(self, path: Path, keep_last: int | None) -> None:
        self.path = Path(os.path.abspath(path))  # the process may go to another directory
        self.partial = self._new_partial()
        self._asked = False
        self._lock: Path | None = None  # also None where the file system has no locks
        self._pointer = self.path / "latest"
        self._keep_last = keep_last

    def checkpoints(self) -> list[Path]:
        """The complete ones, oldest first, by the time of their writing."""
        found = [each for each in self.path.glob("step_*") if _NAME.fullmatch(each.name) and (each / METADATA).is_file()]
        return sorted(found, key=lambda each: ((each / METADATA).stat().st_mtime_ns, _order(each)))

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names; if it is gone, the newest other.

        Raises: CheckpointError if it is there and not whole
        """
        if self._pointer.is_file():
            named = self.path / self._pointer.read_text(errors="replace").strip()
            if named.parent == self.path and _NAME.fullmatch(named.name) and named.is_dir():
                if not (named / METADATA).is_file():
                    raise failure(
                        f"{named}, which is the latest checkpoint, has no {METADATA}",
                        expected="all files of the checkpoint; some tools leave out those whose names begin with a dot",
                        fix="copy it again with them, name an earlier checkpoint, or remove this one",
                        file=named,
                    )
                return named
        return next(reversed(self.checkpoints()), None)

    def _new_partial(self) -> Path:
        return self.path / f"partial_{uuid.uuid4().hex}"

    def lock(self) -> None:
        """Keep other runs from writing here, until ``unlock`` or the end of the process. Raises: CheckpointError naming who does"""
        if not self._asked:
            self._lock = folder_lock.take(self.path / folder_lock.NAME)
            self._asked = True

    def unlock(self) -> None:
        lock, self._lock, self._asked = self._lock, None, False
        if lock is not None:
            folder_lock.give_up(lock)

    def begin(self) -> Path:
        """Make an empty ``partial``, and remove what dead runs have left."""
        if self._lock is not None and not self._lock.exists():  # somebody has removed the folder
            self.unlock()
        self.lock()
        self.path.mkdir(parents=True, exist_ok=True)
        for each in self.path.iterdir() if self._lock is not None else ():
            if is_partial(each.name) and each.name not in _being_written:
                _remove(each)
        self.discard()
        self.partial = self._new_partial()
        _being_written.add(self.partial.name)
        self.partial.mkdir()
        return self.partial

    def discard(self) -> None:
        """Remove ``partial``, if there is one."""
        if self.partial.exists():
            _remove(self.partial)
        _being_written.discard(self.partial.name)

    def commit(self, step: int) -> Path:
        """Name the complete ``partial``, and make it the latest."""
        final = self.path / f"step_{step:06d}"
        number = 1
        sync_folder(self.partial)
        while not _renamed(self.partial, final):  # of another run in this folder, or from before a resume; perhaps it is the latest
            number += 1
            final = self.path / f"step_{step:06d}_{number}"
        _being_written.discard(self.partial.name)
        written = self.path / f"latest_{uuid.uuid4().hex}.partial"
        _being_written.add(written.name)
        with replaced_file(self._pointer, written) as file:
            file.write(final.name.encode())
        _being_written.discard(written.name)
        sync_folder(self.path)  # of both renames; if a power failure loses the first alone, ``latest`` takes the checkpoint before
        return final

    def prune(self) -> None:
        """Remove all but the last ``keep_last``; never the latest."""
        if self._keep_last is None:
            return
        latest = self.latest()
        others = [each for each in sorted(self.checkpoints(), key=_order) if each != latest]  # by step: clocks jump
        for old in others[: max(len(others) + 1 - self._keep_last, 0)]:
            self.discard()
            _being_written.add(self.partial.name)
            with contextlib.suppress(FileNotFoundError):  # another checkpointer has removed it
                old.rename(self.partial)
        self.discard()


def _renamed(folder: Path, to: Path) -> bool:
    """Whether ``folder`` now is ``to``; False if there is a folder already, which another checkpointer may just have made."""
    try:
        if not to.exists():
            folder.rename(to)
            return True
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
