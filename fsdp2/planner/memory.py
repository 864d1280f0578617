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
    """Of a step on one rank. most: by kind, the most bytes at a time, not all at the same one; host: kept in host memory

    moments: the course of the step, one unit after another
    """

    peak: Peak
    most: dict[str, int]
    host: int
    moments: tuple[Moment, ...] = ()


def memory_of(
    before: Sequence[Block],
    blocks: Sequence[Block],
    entries: Sequence[Entry],
    unit_of_node: Callable[[int], str],
    on_host: Collection[str] = (),
) -> Memory:
    """on_host: kinds that lie in host memory"""
    kinds = _kinds(before, blocks, entries)
    now = Counter[str]()
    for block in before:
        now[kinds[block.id]] += block.nbytes
    host = highest_host = sum(now[kind] for kind in on_host)
    total = sum(now.values()) - host
    most = Counter(now)
    peak, at_peak, culprit = total, Counter(now), None
    moments: list[Moment] = []
    for entry in entries:
        if entry.kind not in ("alloc", "free"):
            continue
        block = blocks[entry.id]
        kind = kinds[block.id]
        nbytes = block.nbytes if entry.kind == "alloc" else -block.nbytes
        now[kind] += nbytes
        most[kind] = max(most[kind], now[kind])
        if kind in on_host:
            host += nbytes
            highest_host = max(highest_host, host)
            continue
        total += nbytes
        if entry.kind == "alloc":
            _note(moments, Moment(block.phase, _where(block, unit_of_node), total))
        if total > peak:
            peak, at_peak, culprit = total, Counter(now), block
    phase = where = ""
    if culprit is not None:
        phase, where = culprit.phase, _where(culprit, unit_of_node)
    by_kind = {kind: nbytes for kind, nbytes in at_peak.most_common() if nbytes and kind not in on_host}
    return Memory(Peak(peak, by_kind, phase or "between steps", where), dict(most.most_common()), highest_host, tuple(moments))


def _where(block: Block, unit_of_node: Callable[[int], str]) -> str:
    return block.where if block.node is None else unit_of_node(block.node) or block.where


def _note(moments: list[Moment], moment: Moment) -> None:
    """Add it to the last one, if that is of the same unit and phase."""
    last = moments[-1] if moments else None
    if last is None or (last.phase, last.where) != (moment.phase, moment.where):
        moments.append(moment)
    elif last.nbytes < moment.nbytes:
        moments[-1] = moment


def _kinds(before: Sequence[Block], blocks: Sequence[Block], entries: Sequence[Entry]) -> dict[int, str]:
    """What each block is; what the model's forward has left when backward begins are activations, all else of its own temporaries."""
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
