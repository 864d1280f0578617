"""Checkpoint errors that name file and key, and that every rank raises, so that none waits forever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..core.comm.agreement import agree
from ..errors import CheckpointError, FSDPError

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
    """Turns an OSError while reading ``path``, at ``key``, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        where = f" at {key}" if key is not None else ""
        raise failure(f"{path} cannot be read{where}: {reason}", expected="a readable file", file=path, key=key) from error


# --- all ranks together -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


def on_every_rank(process_group: dist.ProcessGroup | None, what: str, action: Callable[[], T]) -> T:
    """``action()``; if it fails on some ranks, every rank raises an error.

    what:       for the message: "cannot read the checkpoint"
    Collective: yes, over ``process_group``; ``action`` itself need not be
    Raises:     the FSDPError, or a CheckpointError with the cause, of the lowest rank that has one
    """
    result, problem = tried(what, action)
    agree(process_group, problem, None)
    return result[0]


def from_rank_0(process_group: dist.ProcessGroup | None, what: str, action: Callable[[], T]) -> T:
    """The result or the error of ``action()`` on rank 0 of the group, for all ranks, whose views of a disk may differ.

    Collective: yes, over ``process_group``
    """
    is_rank_0 = process_group is None or dist.get_rank(process_group) == 0
    result, problem = tried(what, action) if is_rank_0 else ([], None)
    return agree(process_group, problem, result[0] if result else None)[0]  # type: ignore[return-value]


def tried(what: str, action: Callable[[], T]) -> tuple[list[T], FSDPError | None]:
    """The result of ``action()`` in a list, or its problem: its own FSDPError, or a CheckpointError with the cause.

    Among errors that DCP collected from several ranks, the FSDPError of the lowest.
    """
    try:
        return [action()], None
    except FSDPError as error:
        return [], error
    except (Exception, CheckpointException) as error:
        causes = [cause for _, (cause, _) in sorted(error.failures.items())] if isinstance(error, CheckpointException) else []
        ours = [cause for cause in causes if isinstance(cause, FSDPError)]
        if ours:
            return [], ours[0]
        problem = failure(
            f"{what}: {describe(error)}",
            expected="every rank to succeed",
            fix="fix the cause; the earlier files are unchanged",
        )
        problem.__cause__ = error
        return [], problem


def describe(error: BaseException) -> str:
    """One line; for errors that DCP collected, that of each rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {describe(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
    return f"{type(error).__name__}: {error}"
