"""A folder of checkpoints, one of them the latest: a crash never leaves an incomplete checkpoint under a final name.

    runs/a/latest          one line, "step_000200"; replaced by one rename
    runs/a/step_000100/    complete
    runs/a/step_000200/    complete
    runs/a/partial_1f0c/   being written or removed, or left by a crash; the next save removes it
    runs/a/.lock           held by the run that writes here

``CheckpointFolder`` writes a checkpoint as ``partial_...``, renames it when it is complete, and then names it in
``latest``. To remove a checkpoint, it first renames it back to such a name. So every folder named ``step_...`` is
complete at all times.

Only one run at a time writes to a folder, from its first save until it closes or dies. It holds the operating system's
lock on an open file, which the kernel releases however the process ends, also for other hosts of a network file system.
A process may take the lock several times; its forks do not inherit it. Where the file system has no locks, every
process may write; therefore each incomplete folder has a unique name, and neither two runs nor two checkpointers of one
process collide.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from ..durable import replaced_file, sync_folder
from .dcp_read import METADATA, check_files, check_metadata
from .end_notes import EndNotes
from .failures import failure

WAIT_S = 30.0
"""How long the next run waits for one that is ending."""

LOCK = ".lock"
_POLL_S = 0.05
_MAX_REPLACED = 100
"""Another process may remove the file before we lock it. After so many times, inode numbers are unreliable here."""
_held: dict[Path, tuple[int, int]] = {}
"""The open file and how often it was taken, by path without symbolic links."""


def take_lock(path: Path) -> Path | None:
    """Take the lock at ``path``, creating its folder. Returns the argument of ``give_up_lock``; None if there are no locks.

    Raises: CheckpointError naming the owner if another process still has it after ``WAIT_S``, or if the file cannot be
            created
    """
    path = Path(os.path.realpath(path.parent)) / path.name
    if path in _held:
        file, count = _held[path]
        _held[path] = file, count + 1
        return path
    _close_in_forks()
    deadline = time.monotonic() + WAIT_S
    num_replaced = 0
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the open file: POSIX's lock ends when any other is closed
        except OSError as error:
            has_locks = error.errno in (errno.EACCES, errno.EAGAIN)
            owner = os.pread(file, 200, 0).decode(errors="replace") if has_locks else ""
            _close(file)
            if not has_locks:
                return None
            if time.monotonic() > deadline:
                raise failure(
                    f"another run writes to {path.parent}: {owner or 'an unknown process'}",
                    expected="one run at a time",
                    fix="stop that run, which releases the lock, or give this one its own folder; nothing was changed",
                    file=path,
                ) from None
            time.sleep(_POLL_S)
            continue
        if _is_at(path, file) or num_replaced == _MAX_REPLACED:
            with contextlib.suppress(OSError):  # for messages only
                os.ftruncate(file, 0)
                os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            _held[path] = file, 1
            return path
        num_replaced += 1  # its last owner removed the file in the meantime
        _close(file)


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise failure(
            f"{path} cannot be written: {error.strerror or error}",
            expected="a folder that can be written to",
            fix="choose another folder; nothing was changed",
            file=path,
        ) from error


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


@functools.cache
def _close_in_forks() -> None:
    """A fork inherits its parent's open files and would keep their locks."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    while _held:
        _close(_held.popitem()[1][0])


def _close(file: int) -> None:
    with contextlib.suppress(OSError):  # it has no data that could be lost
        os.close(file)


def give_up_lock(path: Path) -> None:
    """Release the lock once per ``take_lock``. path: the result of ``take_lock``"""
    if path not in _held:
        return  # this process is a fork of the lock's owner
    file, count = _held[path]
    if count > 1:
        _held[path] = file, count - 1
        return
    del _held[path]
    with contextlib.suppress(OSError):
        os.unlink(path)  # before the release: a later process creates a new file
    _close(file)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, this process alone has the lock at ``path``. Raises: CheckpointError"""
    held = take_lock(path)
    try:
        yield
    finally:
        if held is not None:
            give_up_lock(held)


# --- the folder -------------------------------------------------------------------------------------------------------------------


_PARTIAL = re.compile(r"partial(_[0-9a-f]{32})?|latest(_[0-9a-f]{32})?\.partial")
_STEP = re.compile(r"step_(\d+)(?:_(\d+))?")
_being_written: set[str] = set()
"""Partial folders and pointers that this process is writing; its other checkpointers must not remove them."""


def is_partial(name: str) -> bool:
    """Whether a folder with that name is not a checkpoint: it is being written or removed, or a crash left it."""
    return _PARTIAL.fullmatch(name) is not None


class CheckpointFolder:
    """For rank 0. keep_last: how many checkpoints to keep; None for all"""

    def __init__(self, path: Path, keep_last: int | None) -> None:
        self.path = Path(os.path.abspath(path))  # the process may go to another directory
        self.partial = self._new_partial()
        self._asked = False
        self._lock: Path | None = None  # also None where the file system has no locks
        self._pointer = self.path / "latest"
        self._keep_last = keep_last

    def checkpoints(self) -> list[Path]:
        """The complete ones, in the order in which they were written."""
        found = [each for each in self.path.glob("step_*") if _STEP.fullmatch(each.name) and (each / METADATA).is_file()]
        return sorted(found, key=lambda each: ((each / METADATA).stat().st_mtime_ns, _order(each)))

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names; if it is gone, the newest other one.

        Raises: CheckpointError if it exists but is incomplete
        """
        if self._pointer.is_file():
            named = self.path / self._pointer.read_text(errors="replace").strip()
            if named.parent == self.path and _STEP.fullmatch(named.name) and named.is_dir():
                if not (named / METADATA).is_file():
                    raise failure(
                        f"{named}, which is the latest checkpoint, has no {METADATA}",
                        expected="all files of the checkpoint; some copy tools skip names that begin with a dot",
                        fix="copy it again with these, name an earlier checkpoint, or remove this one",
                        file=named,
                    )
                return named
        return next(reversed(self.checkpoints()), None)

    def _new_partial(self) -> Path:
        return self.path / f"partial_{uuid.uuid4().hex}"

    def lock(self) -> None:
        """Keep other runs from writing here until ``unlock``. Raises: CheckpointError naming the owner"""
        if not self._asked:
            self._lock = take_lock(self.path / LOCK)
            self._asked = True

    def unlock(self) -> None:
        lock, self._lock, self._asked = self._lock, None, False
        if lock is not None:
            give_up_lock(lock)

    def begin(self) -> Path:
        """Create an empty ``partial``, and remove the remains of dead runs."""
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
        """Give the complete ``partial`` its final name, and make it the latest."""
        final = self.path / f"step_{step:06d}"
        number = 1
        sync_folder(self.partial)
        while not _renamed(self.partial, final):  # another run's, or from before a resume; perhaps it is the latest
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
    """Whether ``folder`` is ``to`` now; False if that exists: another checkpointer may just have created it."""
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


def step_of(checkpoint: Path) -> int:
    return _order(checkpoint)[0]


def _order(path: Path) -> tuple[int, int]:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


class Store:
    """A folder that all ranks see.

    leader:    the rank that creates and removes checkpoints in it
    is_locked: whether it is ours to write to
    latest:    checkpoint, as the leader knows it
    number:    of the checkpoint that was made last; None: not known yet
    end:       what tells the next run how this one has ended, with the checkpoints on disk
    """

    num_hosts = 1

    def __init__(self, folder: CheckpointFolder, rank: int, leader: int = 0, optimizer: Optimizer | None = None) -> None:
        self.folder = folder
        self.end = EndNotes(folder.path, optimizer)
        self.leader = leader
        self.leads = rank == leader
        self.is_locked = False
        self.latest: Path | None = None
        self.number: int | None = None

    def complete(self, into: Path, metadata: Metadata | None) -> None:
        """After all ranks have written to ``into``. metadata: of their files, on the leader. Raises: CheckpointError"""
        if metadata is not None:  # not read again: that takes Python as long as all else of a save, while training waits for it
            check_metadata(into / METADATA, metadata)
            check_files(into, metadata)  # other ranks may have written to folders of their own
