"""The moments of traced steps, as spans of one rank on its own clock: modules that compute, hooks that wait, collectives under way.

It hears what ``inspect/events.py`` tells.

Worked example, two layers in forward: ``forward of 0`` computes, a hook waits for ``all-gather of 1``, ``forward of 1`` computes; the
all-gather of 1 is under way from before ``forward of 0`` to the end of that wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..inspect import Record
from .computing import BETWEEN, Computing
from .memory_now import MemoryNow
from .meter import nbytes_of

Row = Literal["phase", "compute", "collective"]


@dataclass(slots=True)  # frozen ones cost a call for each field
class Span:
    """begin, end: ns. row "phase": forward, backward and optimizer of the root; "compute": what the main thread does, one after another

    kind: "forward", "backward", "optimizer", "wait", or of the collective
    """

    row: Row
    kind: str
    unit: str
    begin: int
    end: int
    nbytes: int = 0
    phase: str = ""


@dataclass(slots=True)
class Sample:
    """Bytes by kind at a time."""

    at: int
    nbytes: dict[str, int]


class Moments(Computing[int]):
    """spans, samples: so far. allocated: returns the allocator's bytes, if there is an allocator that counts"""

    def __init__(self, clock: Callable[[], int] = time.time_ns, allocated: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self._clock = clock
        self._allocated = allocated
        self._memory = MemoryNow()
        self._phase = ("", 0)  # and when it began
        self._under_way: dict[int, tuple[Record, int]] = {}
        self._waits_since = 0

    def issued(self, record: Record, owner: object, num_ranks: int) -> None:
        self._under_way[id(record)] = record, self._clock()
        self._memory.note(owner)

    def waits(self, record: Record) -> None:
        self._waits_since = self._clock()
        self._sample(self._waits_since)

    def done(self, record: Record) -> None:
        now = self._clock()
        begun = self._under_way.pop(id(record), None)
        if begun is not None:
            self.spans.append(Span("collective", record.kind, record.unit, begun[1], now, nbytes_of(record), self._phase[0]))
            self.spans.append(Span("compute", "wait", f"{record.kind} of {record.unit}", self._waits_since, now, phase=self._phase[0]))

    def begins(self, phase: str, unit: str) -> None:
        now = self._clock()
        self._begin(phase, unit, now)
        if self._phase[0] != phase:
            self._phase = phase, now

    def ends(self, phase: str, unit: str) -> None:
        self._end(phase, unit, self._clock())

    def resumes(self) -> None:
        now = self._clock()
        self._resume(now)
        self._sample(now)

    def leaves(self) -> None:
        now = self._clock()
        self._pause(now)
        phase, begun = self._phase
        if phase:
            self.spans.append(Span("phase", phase, "", begun, now))
        self._phase = "", 0
        self._open.clear()
        self._sample(now)

    def begin_optimizer(self) -> None:
        self._phase = "optimizer", self._clock()

    def end_optimizer(self) -> None:
        phase, begun = self._phase
        if phase == "optimizer":
            self.spans.append(Span("phase", phase, "", begun, self._clock()))
            self._phase = "", 0

    def _computed(self, phase: str, unit: str, begin: int, end: int) -> None:
        if phase != BETWEEN:
            self.spans.append(Span("compute", phase, unit, begin, end, phase=phase))

    def _sample(self, now: int) -> None:
        nbytes = self._memory.look()
        if self._allocated is not None:
            nbytes["allocated"] = self._allocated()
        self.samples.append(Sample(now, nbytes))
