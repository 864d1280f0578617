"""Counts the work of a step: collectives by phase and kind, host time in our hooks, and the part of it that waits.

It hears what ``inspect/events.py`` tells.

Worked example: forward of ``layers.0`` begins at 0 ms, its all-gather of 1 MB over 2 ranks is waited for from 1 to 3 ms, and the hook
returns at 4 ms: forward has 1 all-gather of 1 MB, of which each rank sends 0.5 MB; 2 ms are exposed, and the hooks had 2 ms of
their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..inspect import Listener, Record
from ..planner.traffic import sent_by_each
from .memory_now import MemoryNow

DTYPE_NBYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
BETWEEN = "between"
"""The phase outside of forward and backward: clipping, the optimizer, checkpoints."""


def nbytes_of(record: Record) -> int:
    """Bytes of the whole buffer, padding included; a tensor of another dtype travels as bytes."""
    return record.numel * DTYPE_NBYTES.get(record.dtype, 1)


@dataclass
class Tally:
    """One kind of collective in one phase. nbytes: of buffers; sent: by this rank, around a ring; exposed: seconds waited"""

    calls: int = 0
    nbytes: int = 0
    sent: int = 0
    exposed: float = 0.0


@dataclass
class Counts:
    """Since the last step. hooks: seconds in our hooks, waiting left out"""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    hooks: float = 0.0

    @property
    def exposed(self) -> float:
        return sum(each.exposed for each in self.tallies.values())


class Meter(Listener):
    """``take`` returns the counts since the last call. memory: measured where much of it is in use"""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.memory = MemoryNow()
        self._clock = clock
        self._counts = Counts()
        self._phase = BETWEEN
        self._hook_since: float | None = None
        self._waits_since: float | None = None
        self._waited = 0.0  # in this hook

    def take(self) -> Counts:
        taken, self._counts = self._counts, Counts()
        return taken

    def issued(self, record: Record, owner: object, num_ranks: int) -> None:
        tally = self._tally(record)
        nbytes = nbytes_of(record)
        tally.calls += 1
        tally.nbytes += nbytes
        tally.sent += sent_by_each("all_reduce" if record.kind.startswith("all-reduce") else record.kind, nbytes, num_ranks)
        self.memory.note(owner)

    def waits(self, record: Record) -> None:
        self.memory.look()
        self._waits_since = self._clock()

    def done(self, record: Record) -> None:
        if self._waits_since is not None:
            waited = self._clock() - self._waits_since
            self._waits_since = None
            self._tally(record).exposed += waited
            self._waited += waited

    def begins(self, phase: str, unit: str) -> None:
        self._phase = phase
        self._enter_hook()

    def ends(self, phase: str, unit: str) -> None:
        self._enter_hook()

    def _enter_hook(self) -> None:
        self._hook_since, self._waited = self._clock(), 0.0

    def resumes(self) -> None:
        if self._hook_since is not None:
            self._counts.hooks += self._clock() - self._hook_since - self._waited
            self._hook_since = None
            self.memory.look()

    def leaves(self) -> None:
        self.resumes()
        self._phase = BETWEEN

    def _tally(self, record: Record) -> Tally:
        key = self._phase, record.kind
        tally = self._counts.tallies.get(key)
        if tally is None:
            tally = self._counts.tallies[key] = Tally()
        return tally
