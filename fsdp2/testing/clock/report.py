"""How a stretch of virtual time divides: computing, exposed communication and copies by phase, idle gaps. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .timeline import COMPUTE, Span

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a stretch as the compute stream sees them; they add up to it.

    exposed:  by phase: it does nothing, and a collective runs
    waiting:  it does nothing, no collective runs, and another stream packs, unpacks or copies
    idle:     nothing runs: the device waits for the host (gaps: how many such times above 1 us)
    """

    computing: float
    exposed: dict[str, float]
    waiting: float
    idle: float
    gaps: int


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as disjoint intervals, ascending: [(0, 2), (1, 3), (5, 6)] -> [(0, 3), (5, 6)]."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of ``intervals`` that are in none of ``others``; both disjoint and ascending."""
    result: list[Interval] = []
    index = 0
    for start, stop in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        position, at = start, index
        while at < len(others) and others[at][0] < stop:
            if others[at][0] > position:
                result.append((position, others[at][0]))
            position = max(position, others[at][1])
            at += 1
        if position < stop:
            result.append((position, stop))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


def break_down(spans: Sequence[Span], start: float, stop: float) -> Breakdown:
    """The gaps between ``start`` and ``stop``. A gap belongs to the phase of the next work on the compute stream."""

    def inside(chosen: Iterable[Span]) -> list[Interval]:
        return union((max(span.start, start), min(span.stop, stop)) for span in chosen if span.stop > start and span.start < stop)

    compute = [span for span in spans if span.stream == COMPUTE and span.entry.kind != "collective"]
    computing = inside(compute)
    communicating = inside(span for span in spans if span.entry.kind == "collective")
    elsewhere = inside(span for span in spans if span.stream != COMPUTE and span.entry.kind != "collective")
    exposed: dict[str, float] = defaultdict(float)
    position = start
    for span in [*sorted(compute, key=lambda each: each.start), None]:
        until, phase = (min(span.start, stop), span.phase) if span is not None else (stop, "end")
        if until > position:
            gap = [(position, until)]
            exposed[phase] += length(gap) - length(without(gap, communicating))
        if span is not None:
            position = max(position, span.stop)
    quiet = without(without([(start, stop)], computing), communicating)
    idle = without(quiet, elsewhere)
    by_phase = {phase: seconds for phase, seconds in exposed.items() if seconds > 0}
    gaps = sum(1 for one in idle if one[1] - one[0] > 1e-6)
    return Breakdown(length(computing), by_phase, length(quiet) - length(idle), length(idle), gaps)
