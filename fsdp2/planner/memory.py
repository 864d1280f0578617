"""Bytes at a time, from a step that was written down: the peak, where it occurs, and what it is made of. Pure functions.

Worked example: 8 MB are there when a step begins; it allocates 4 MB, frees them, and allocates 6 MB. The peak is 14 MB, at the last
allocation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..testing.clock.trace import Entry
from . import recorder as labels
from .recorder import Block

_PAGE_LOCKED = (labels.PARAMETERS, labels.GRADIENTS, labels.REDUCING)


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
    """The bytes of a step on one rank.

    most:    by kind, the most bytes at a time, not all at the same one, on the device and on the host
    host:    the most bytes in host memory; of files what is in memory. Page-locked tensors are counted as torch allocates them
    files:   bytes of files
    moments: the course of the step, one unit after another
    """

    peak: Peak
    most: dict[str, int]
    host: int
    moments: tuple[Moment, ...] = ()
    files: int = 0


@dataclass(frozen=True)
class FileBytes:
    """Of a rank's files: all of them, and the most that is in memory at a time."""

    nbytes: int = 0
    in_memory: int = 0


@dataclass(frozen=True)
class Visit:
    """A stretch of a step in which one unit allocates.

    moments: bytes of the device by kind after its first allocation, at its peak, and after its last allocation
    most:    by kind, the most at a time, on the device and on the host; host: the most in host memory, without files
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
) -> list[Visit]:
    """The step as visits, in order; the first one is what was there before."""
    kinds = _kinds(before, blocks, entries)
    now, here = Counter[str](), Counter[str]()  # everywhere; on the device
    for block in before:
        now[kinds[block.id]] += block.nbytes
        here[kinds[block.id]] += 0 if block.on_host else block.nbytes
    host = sum(_nbytes_on_host(block, kinds[block.id]) for block in before)
    total = sum(here.values())
    visits = [Visit("between steps", "", (dict(here),) * 3, dict(now), host)]
    phase = where = ""
    first = highest = last = Counter(here)
    most = Counter(now)
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
        if not block.on_host:
            here[kind] += nbytes
            total += nbytes
        else:
            host += _nbytes_on_host(block, kind) * (1 if entry.kind == "alloc" else -1)
        if entry.kind == "free":
            continue
        unit = block.where if block.node is None else unit_of_node(block.node) or block.where
        if not has_begun or (block.phase, unit) != (phase, where):
            end_visit()
            phase, where, has_begun = block.phase, unit, True
            first = highest = Counter(here)
            most, peak, highest_host = Counter(now), total, host
        last = Counter(here)
        most[kind] = max(most[kind], now[kind])
        highest_host = max(highest_host, host)
        if total > peak:
            peak, highest = total, last
    end_visit()
    return visits


def memory_of(visits: Sequence[Visit], files: FileBytes) -> Memory:
    candidates = [(visit, moment) for visit in visits for moment in visit.moments]
    visit, at_peak = max(candidates, key=lambda each: sum(each[1].values()))
    by_kind = {kind: nbytes for kind, nbytes in Counter(at_peak).most_common() if nbytes}
    most = Counter[str]()
    for each in visits:
        most |= Counter(each.most)
    peak = Peak(sum(at_peak.values()), by_kind, visit.phase, visit.where)
    course = tuple(Moment(each.phase, each.where, max(sum(moment.values()) for moment in each.moments)) for each in visits[1:])
    host = max(each.host for each in visits) + files.in_memory
    return Memory(peak, dict(most.most_common()), host, course, files.nbytes)


def rounded_to_power_of_two(nbytes: int) -> int:
    """What torch allocates for a page-locked tensor: (5 << 20) takes 8 << 20."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def _nbytes_on_host(block: Block, kind: str) -> int:
    """What a block takes of host memory without files; offloaded shards and gradients are page-locked."""
    if not block.on_host or block.in_file:
        return 0
    return rounded_to_power_of_two(block.nbytes) if kind in _PAGE_LOCKED else block.nbytes


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
