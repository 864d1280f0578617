"""How an error of a checkpoint is worded: with the file and the key that it is about."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError, message

FIX = "check that the download or the save was complete; nothing was changed"


def failure(
    headline: str,
    *,
    expected: str,
    fix: str = FIX,
    items: Iterable[str] = (),
    file: Path | str | None = None,
    key: str | None = None,
) -> CheckpointError:
    """A CheckpointError to raise, with ``file`` and ``key`` as attributes."""
    error = CheckpointError(message(headline, items=items, expected=expected, fix=fix))
    error.file = None if file is None else str(file)
    error.key = key
    return error
