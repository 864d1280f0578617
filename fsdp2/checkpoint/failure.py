"""How an error of a checkpoint is worded: with the file and the key that it is about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import CheckpointError

FIX = "check that the download or the save was complete; nothing was changed"


def failure(
    headline: str,
    *,
    expected: str,
    fix: str = FIX,
    items: Iterable[str] = (),
    problems: Mapping[str, str] | None = None,
    file: Path | str | None = None,
    key: str | None = None,
) -> CheckpointError:
    """A CheckpointError to raise, with ``file`` and ``key`` as attributes.

    problems: what is wrong with each of several keys, in place of ``items`` and ``key``, which is the first
    """
    if problems is not None:
        items, key = (f"{name}: {problem}" for name, problem in problems.items()), next(iter(problems))
    error = CheckpointError(headline, items=items, expected=expected, fix=fix)
    error.file = None if file is None else str(file)
    error.key = key
    return error


@contextlib.contextmanager
def readable(path: Path, key: str | None = None) -> Iterator[None]:
    """Around reading ``path``, at ``key``: turns an error of the operating system into a CheckpointError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        where = f" at {key}" if key is not None else ""
        raise failure(f"{path} cannot be read{where}: {reason}", expected="a readable file", file=path, key=key) from error
