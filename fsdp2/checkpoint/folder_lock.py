"""One run at a time writes to a place: it holds a lock, which ends with the process.

It is the operating system's lock on a file: the kernel releases it when the process ends in any way, also for other hosts of a
network file system. A process may take it several times. On a file system without locks every process may write. This file refuses to
know what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from .failure import failure

try:
    from fcntl import LOCK_EX, LOCK_NB, lockf

    HAS_LOCKS = True
except ImportError:  # a system without them
    HAS_LOCKS = False

WAIT_S = 30.0
"""So long a run that is ending may keep the next one waiting."""

NAME = ".lock"
_POLL_S = 0.05
_held: dict[Path, tuple[int, int, int]] = {}
"""The open file, how often it was taken, and by which process: a fork has this dict, and not the lock.

Closing another file of that path would give up the lock (POSIX), so a path has one name here, without symbolic links.
"""


def take(path: Path) -> Path | None:
    """Take the lock at ``path``, whose folder is made. Returns the name for ``give_up``; None where the file system has no locks.

    Raises: CheckpointError naming its owner, if another process has had it for ``WAIT_S``; or if the file cannot be made
    """
    path = Path(os.path.realpath(path.parent)) / path.name
    if path in _held and _held[path][2] == os.getpid():
        file, count, owner_id = _held[path]
        _held[path] = file, count + 1, owner_id
        return path
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise failure(
                f"{path} cannot be written: {error.strerror or error}",
                expected="a folder that can be written to",
                fix="name another; nothing was changed",
                file=path,
            ) from error
        owner = _locked(file, path)
        if owner is None:
            _held[path] = file, 1, os.getpid()
            return path
        os.close(file)
        if owner is _NO_LOCKS:
            return None
        if owner and time.monotonic() > deadline:
            raise failure(
                f"another run writes to {path.parent}: {owner}",
                expected="one run at a time",
                fix="end that run, which gives up the lock, or give this one a folder of its own; nothing was changed",
                file=path,
            )
        if owner:
            time.sleep(_POLL_S)


_NO_LOCKS = "the file system has no locks"


def _locked(file: int, path: Path) -> str | None:
    """None if the lock is ours now; else its owner, or "" if its last owner has removed the file in between."""
    if not HAS_LOCKS:
        return _NO_LOCKS
    try:
        lockf(file, LOCK_EX | LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return _NO_LOCKS
        return os.pread(file, 200, 0).decode(errors="replace") or "an unknown process"
    try:
        if os.stat(path).st_ino != os.fstat(file).st_ino:
            return ""
    except FileNotFoundError:
        return ""
    with contextlib.suppress(OSError):  # for messages only
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return None


def give_up(path: Path) -> None:
    """Give the lock back, as often as it was taken. path: the result of ``take``"""
    file, count, owner_id = _held[path]
    if owner_id != os.getpid():
        return  # this process is a fork of the lock's owner
    if count > 1:
        _held[path] = file, count - 1, owner_id
        return
    del _held[path]
    with contextlib.suppress(OSError):
        os.unlink(path)  # before it is given up: who comes later makes another
    os.close(file)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, this process alone has the lock at ``path``. Raises: CheckpointError"""
    held = take(path)
    try:
        yield
    finally:
        if held is not None:
            give_up(held)
