"""The one place where a reader hears of this rank's collectives, and of units whose forward or backward begins.

``current`` is None unless somebody reads, and testing that is all that a step pays otherwise.
``fsdp2/inspect/events.py`` puts a log there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from ...lost_ranks import raise_lost
from .streams import Stream, Streams


class CollectiveLog(Protocol):
    """What the core calls at each collective, and when a unit's forward or backward begins or ends."""

    def issued(
        self,
        owner: object,
        kind: str,
        unit: str,
        numel: int,
        dtype: torch.dtype | None,
        process_group: dist.ProcessGroup,
    ) -> None:
        """``owner`` is about to issue a collective; an owner has at most one of each kind under way."""

    def waits(self, owner: object, kind: str) -> None:
        """The host is about to wait for the collective."""

    def done(self, owner: object, kind: str, streams: Streams | None = None, stream: Stream = None) -> None:
        """The collective is complete for the host; on a device, once what ``stream`` has been given so far has run."""

    def enter(self, phase: str, unit: str) -> None:
        """The main thread begins with ``phase`` of ``unit``."""

    def exit(self, phase: str, unit: str) -> None:
        """A hook after ``phase`` of ``unit`` begins; "" stands for all units."""

    def resume(self) -> None:
        """The hook that called ``enter`` or ``exit`` returns."""

    def fail(self, phase: str, unit: str) -> None:
        """An exception has ended ``phase`` of ``unit``. The phase around it calls this too, when it gets there."""

    def leave(self) -> None:
        """The forward, or the backward, of the root has ended."""


current: CollectiveLog | None = None
"""The log that records; None if there is none. Read it as an attribute of this module, each time."""


@contextlib.contextmanager
def during(kind: str, process_group: dist.ProcessGroup | None, tensor: torch.Tensor | None = None) -> Iterator[None]:
    """Around a collective that this rank issues and waits for at one place; process_group None: without records.

    Raises: LostRankError
    """
    log = None if process_group is None else current
    owner = object()
    if log is not None and process_group is not None:
        numel, dtype = (0, None) if tensor is None else (tensor.numel(), tensor.dtype)
        log.issued(owner, kind, "", numel, dtype, process_group)
        log.waits(owner, kind)
    try:
        yield
    except RuntimeError as error:
        raise_lost(error, f"the {kind}")
    if log is not None:
        log.done(owner, kind)
