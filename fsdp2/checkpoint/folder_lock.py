"""One run at a time writes to a place: it holds a lock, which ends with the process.

It is the operating system's lock on an open file: the kernel releases it when the process ends in any way, also for other hosts of a
network file system. A process may take it several times; its forks do not have it. On a file system without locks every process may
write.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .failure import failure

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # a system without them
    HAS_LOCKS = False

WAIT_S = 30.0
"""So long a run that is ending may keep the next one waiting."""

NAME = ".lock"
_POLL_S = 0.05
_MAX_REPLACED = 100
"""Another process may remove the file between our opening and locking it; so often in a row, inode numbers tell nothing here."""
_held: dict[Path, tuple[int, int]] = {}
"""The open file, and how often it was taken. A path has one name here, without symbolic links."""


def take(path: Path) -> Path | None:
    """Take the lock at ``path``, whose folder is made. Returns the name for ``give_up``; None where the file system has no locks.

    Raises: CheckpointError naming its owner, if another process has had it for ``WAIT_S``; or if the file cannot be made
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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise failure(
                f"{path} cannot be written: {error.strerror or error}",
                expected="a folder that can be written to",
                fix="name another; nothing was changed",
                file=path,
            ) from error
        owner = _locked(file, path)
        num_replaced += owner == ""
        if owner is None or num_replaced > _MAX_REPLACED:
            _held[path] = file, 1
            return path
        _close(file)
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
        _set_lock(file)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return _NO_LOCKS
        return os.pread(file, 200, 0).decode(errors="replace") or "an unknown process"
    try:
        if not os.path.samestat(os.stat(path), os.fstat(file)):
            return ""
    except FileNotFoundError:
        return ""
    with contextlib.suppress(OSError):  # for messages only
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return None


def _set_lock(file: int) -> None:
    """Raises: OSError if another open file has the lock"""
    if sys.platform == "linux":  # the lock is the open file's: POSIX's is lost when the process closes any other file of that name
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@functools.cache
def _close_in_forks() -> None:
    """A fork has the open files of its parent too, and would keep their locks after it."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    while _held:
        _close(_held.popitem()[1][0])


def _close(file: int) -> None:
    with contextlib.suppress(OSError):  # it has no data that could be lost
        os.close(file)


def give_up(path: Path) -> None:
    """Give the lock back, as often as it was taken. path: the result of ``take``"""
    if path not in _held:
        return  # this process is a fork of the lock's owner
    file, count = _held[path]
    if count > 1:
        _held[path] = file, count - 1
        return
    del _held[path]
    with contextlib.suppress(OSError):
        os.unlink(path)  # before it is given up: who comes later makes another
    _close(file)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, this process alone has the lock at ``path``. Raises: CheckpointError"""
    held = take(path)
    try:
        yield
    finally:
        if held is not None:
            give_up(held)
