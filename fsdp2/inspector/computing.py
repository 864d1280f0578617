"""Which unit computes: from the return of one hook of fsdp2 to the begin of the next.

Worked example: the root's forward calls layer 0, and then computes a loss

    begins forward of the root, resumes     the root computes until
    begins forward of 0, resumes            0 computes until
    ends forward of 0, resumes              the root computes again until
    ends forward of the root, leaves        nothing of the model does: what follows is between forward and backward
"""

from __future__ import annotations

from typing import Generic, TypeVar

from ..inspect import Listener

BETWEEN = "between"
"""The phase outside of forward and backward: clipping, the optimizer, checkpoints, waiting for data."""

Stamp = TypeVar("Stamp")


class Computing(Listener, Generic[Stamp]):
    """Calls ``_computed`` with each such time. A stamp: a time, or an event of a device"""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []  # phases of units that have begun, and not ended
        self._since: Stamp | None = None  # the last of them computes; None: a hook runs

    def _computed(self, phase: str, unit: str, begin: Stamp, end: Stamp) -> None:
        raise NotImplementedError

    def _begin(self, phase: str, unit: str, now: Stamp) -> None:
        self._pause(now)
        self._open.append((phase, unit))

    def _end(self, phase: str, unit: str, now: Stamp) -> None:
        self._pause(now)
        if not unit:
            self._open.clear()
        elif (phase, unit) in self._open:
            self._open.reverse()
            self._open.remove((phase, unit))
            self._open.reverse()

    def _resume(self, now: Stamp) -> None:
        self._since = now

    def _pause(self, now: Stamp) -> None:
        """The module that computes stops, as far as the main thread knows."""
        if self._since is not None:
            phase, unit = self._open[-1] if self._open else (BETWEEN, "")
            self._computed(phase, unit, self._since, now)
        self._since = None
