"""Bytes at a time, from a step that was written down: the peak, where it occurs, and what it is made of. Pure functions.

Worked example: 8 MB are there when a step begins; it allocates 4 MB, frees them, and allocates 6 MB. The peak is 14 MB, at the last
allocation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..testing.clock.trace import Entry
from . import recorder as labels
from .recorder import Block


@dataclass(frozen=True)
class Peak:
    """The most bytes at a time. by_kind: what they are; phase, where: of the step, and the unit that runs"""

    nbytes: int
    by_kind: dict[str, int]
    phase: str
    where: str


@dataclass(frozen=True)
class Moment:
    """While one unit runs in one phase, the most bytes at a time."""

    phase: str
    where: str
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """The bytes of a step on one rank. most: by kind, the most bytes at a time, not all at the same one; host: kept in host memory

    moments: the course of the step, one unit after another
    """

    peak: Peak
    most: dict[str, int]
    host: int
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class Visit:
    """A stretch of a step in which one unit allocates.

    moments: bytes by kind behind its first allocation, at its peak, and behind its last allocation
    most:    by kind, the most at a time; host: the most in host memory
    """

    phase: str
    where: str
    moments: tuple[dict[str, int], ...]
    most: dict[str, int]
    host: int


def visits_of(
    before: Sequence[Block],
    blocks: Sequence[Block],
    entries: Sequence[Entry],
    unit_of_node: Callable[[int], str],
    on_host: Collection[str] = (),
) -> list[Visit]:
    """The step as visits, in order; the first one is what was there before. on_host: kinds that lie in host memory"""
    kinds = _kinds(before, blocks, entries)
    now = Counter[str]()
    for block in before:
        now[kinds[block.id]] += block.nbytes
    host = sum(now[kind] for kind in on_host)
    total = sum(now.values()) - host
    visits = [Visit("between steps", "", (dict(now),) * 3, dict(now), host)]
    phase = where = ""
    first = highest = last = most = Counter(now)
    peak, highest_host, has_begun = total, host, False

    def end_visit() -> None:
        if has_begun:
            visits.append(Visit(phase, where, (dict(first), dict(highest), dict(last)), dict(most), highest_host))

    for entry in entries:
        if entry.kind not in ("alloc", "free"):
            continue
        block = blocks[entry.id]
        kind = kinds[block.id]
        nbytes = block.nbytes if entry.kind == "alloc" else -block.nbytes
        now[kind] += nbytes
        if kind in on_host:
            host += nbytes
        else:
            total += nbytes
        if entry.kind == "free":
            continue
        unit = block.where if block.node is None else unit_of_node(block.node) or block.where
        if not has_begun or (block.phase, unit) != (phase, where):
            end_visit()
            phase, where, has_begun = block.phase, unit, True
            first = highest = Counter(now)
            most, peak, highest_host = Counter(now), total, host
        last = Counter(now)
        most[kind] = max(most[kind], now[kind])
        highest_host = max(highest_host, host)
        if total > peak and kind not in on_host:
            peak, highest = total, last
    end_visit()
    return visits


def memory_of(visits: Sequence[Visit], on_host: Collection[str] = ()) -> Memory:
    """on_host: kinds that lie in host memory"""

    def on_device(moment: dict[str, int]) -> int:
        return sum(nbytes for kind, nbytes in moment.items() if kind not in on_host)

    candidates = [(visit, moment) for visit in visits for moment in visit.moments]
    visit, at_peak = max(candidates, key=lambda each: on_device(each[1]))
    by_kind = {kind: nbytes for kind, nbytes in Counter(at_peak).most_common() if nbytes and kind not in on_host}
    most = Counter[str]()
    for each in visits:
        most |= Counter(each.most)
    peak = Peak(on_device(at_peak), by_kind, visit.phase, visit.where)
    course = tuple(Moment(each.phase, each.where, max(map(on_device, each.moments))) for each in visits[1:])
    return Memory(peak, dict(most.most_common()), max(each.host for each in visits), course)


def _kinds(before: Sequence[Block], blocks: Sequence[Block], entries: Sequence[Entry]) -> dict[int, str]:
    """The kind of each block; those that the model's forward leaves until backward are activations, its others are temporaries."""
    kinds = {block.id: block.label for block in before}
    made_in_forward: set[int] = set()
    phase = ""
    for entry in entries:
        if entry.kind == "mark":
            phase = entry.name
            if phase == "backward":
                for each in made_in_forward:
                    kinds[each] = labels.ACTIVATIONS
                made_in_forward = set()
        elif entry.kind == "alloc":
            label = blocks[entry.id].label
            if label == labels.ACTIVATIONS:
                label = labels.TEMPORARY
                if phase == "forward":
                    made_in_forward.add(entry.id)
            kinds[entry.id] = label
        elif entry.kind == "free":
            made_in_forward.discard(entry.id)
    return kinds
