"""What begins when it is called and runs until it is told to stop: ledger, record, trace, watch, watchdog, install.

with fsdp2.ledger(folder, model, optimizer):        ledger = fsdp2.ledger(folder, model, optimizer)
    train()                                         train()
                                                    ledger.stop()
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from .errors import OrderError

if TYPE_CHECKING:
    from typing_extensions import Self


class UntilStopped:
    """A subclass overrides ``_begin``; where that raises, what it has added so far is undone."""

    _has_ended = False

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            self._begin(undo)
            self._undo = undo.pop_all()

    def _begin(self, undo: contextlib.ExitStack) -> None:
        """Add hooks, files, threads, and for each of them its end to ``undo``, which passes on the exception that leaves a block."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it: its hooks are removed, its files closed. A second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        if self._has_ended:
            name = type(self).__name__
            raise OrderError(
                f"with {name}: it has ended before the block begins",
                expected=f"a {name} that runs, or a new one",
                fix="make it in the with statement itself: it begins there, and ends with the block",
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._has_ended = True
        self._undo.__exit__(kind, error, traceback)
