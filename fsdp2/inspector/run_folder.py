"""The places of files in a run's folder, and files whose lines are whole after a crash.

run/
  run.json               of rank 0: world size, versions, the plan, findings
  ledger.rank0.jsonl     a line for each step of that rank
  record.rank0.jsonl     fingerprints of each step of that rank
  trace.rank0.json       spans and samples of that rank, in Chrome's trace format
  trace.json             those of all ranks
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..durable import replaced_file
from ..errors import ArgumentError, OrderError
from .expected import misfit

Values = dict[str, Any]


class Lines:
    """A new file to which each line is appended by one call of the operating system: others see whole lines only."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_if_open(path)
        path.unlink(missing_ok=True)  # of an earlier run; or a link, through which another file would be written
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, values: Values) -> None:
        os.write(self._file, (json.dumps(values, separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # forks have the open file, too, and would keep its lock
        os.close(self._file)


def _refuse_if_open(path: Path) -> None:
    """Raises: OrderError if somebody writes lines into the file at ``path``, which a second one would remove unseen"""
    if not path.is_file() or path.is_symlink():
        return
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OrderError(
                f"{path} is being written by another {path.name.split('.')[0]}, of this program or another",
                expected="one at a time for each rank and folder",
                fix="stop() that one first, or give each a folder of its own",
            ) from None
        except OSError:  # the file system has no locks
            pass


def read_lines(path: Path, shape: Any) -> list[Values]:
    """Whole lines; of a last one that was cut off where a disk was full, nothing. Raises: ArgumentError if one has not ``shape``"""
    lines = _text(path).split("\n")[:-1]
    return [_values(line, shape, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def read_json(path: Path, shape: Any) -> Values:
    """Raises: ArgumentError if ``path`` has not ``shape``"""
    return _values(_text(path), shape, str(path))


def _text(path: Path) -> str:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise OSError("it is no file")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(str(path), str(error)) from None


def _values(text: str, shape: Any, where: str) -> Values:
    try:
        values: Values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(where, str(error)) from None
    if said := misfit(values, shape):
        raise _broken(where, said.removeprefix(": "))
    return values


def _broken(where: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"{where} cannot be read: {why}", expected="a file that fsdp2 has written", fix="write it again, or remove it from the folder"
    )


def write_json(path: Path, values: Any) -> None:
    """Write at once: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path, path.with_name(f".{path.name}.{os.getpid()}")) as file:
        file.write(json.dumps(values).encode())


def rank_file(folder: Path, kind: str, rank: int, suffix: str) -> Path:
    return folder / f"{kind}.rank{rank}.{suffix}"


def rank_files(folder: Path, kind: str, suffix: str) -> Iterator[tuple[int, Path]]:
    """(rank, path), by rank."""
    found = {}
    for path in folder.glob(f"{kind}.rank*.{suffix}"):
        match = re.fullmatch(rf"{re.escape(kind)}\.rank(\d+)\.{re.escape(suffix)}", path.name)
        if match is not None:
            found[int(match[1])] = path
    yield from sorted(found.items())


def drop_absent_ranks(folder: Path, kind: str, suffix: str, num_ranks: int) -> None:
    """Files of ranks that this run does not have: an earlier one in the same folder had more. No rank of this run writes them."""
    for rank, path in rank_files(folder, kind, suffix):
        if rank >= num_ranks:
            path.unlink(missing_ok=True)


def folder_of(path: Any, caller: str) -> Path:
    """Raises: ArgumentError if ``path`` is no path, or a file."""
    if not isinstance(path, (str, os.PathLike)) or Path(path).is_file():
        raise ArgumentError(
            f"{caller} got {path!r}", expected="a folder, which need not exist yet", fix=f'for instance fsdp2.{caller}("run")'
        )
    return Path(path)
