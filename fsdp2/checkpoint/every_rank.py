"""Do something on every rank, or on rank 0 for all: an error on one rank is an error on every rank, so that no rank waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..core.comm.agreement import agree
from ..errors import FSDPError
from .failure import failure

T = TypeVar("T")


def on_every_rank(process_group: dist.ProcessGroup | None, what: str, action: Callable[[], T]) -> T:
    """``action()``; if it raises on some ranks, every rank raises.

    what:       for the message: "cannot read the checkpoint"
    Collective: yes, over ``process_group``; ``action`` itself need not be
    Raises:     the FSDPError, or a CheckpointError with the cause, of the lowest rank that has one
    """
    result, problem = tried(what, action)
    agree(process_group, problem, None)
    return result[0]


def from_rank_0(process_group: dist.ProcessGroup | None, what: str, action: Callable[[], T]) -> T:
    """The result or the error of ``action()`` on rank 0 of the group, on all ranks: they agree even if their views of a disk differ.

    Collective: yes, over ``process_group``
    """
    is_rank_0 = process_group is None or dist.get_rank(process_group) == 0
    result, problem = tried(what, action) if is_rank_0 else ([], None)
    return agree(process_group, problem, result[0] if result else None)[0]  # type: ignore[return-value]


def tried(what: str, action: Callable[[], T]) -> tuple[list[T], FSDPError | None]:
    """The result of ``action()``, alone in a list, or its problem: its own FSDPError, or a CheckpointError with the cause.

    Of what DCP has collected from several ranks, the FSDPError of the lowest.
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
            fix="mend the cause; the files that were there before are unchanged",
        )
        problem.__cause__ = error
        return [], problem


def describe(error: BaseException) -> str:
    """One line; of an error that DCP has collected, what each rank said."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {describe(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
    return f"{type(error).__name__}: {error}"
