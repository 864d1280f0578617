"""A program's orders to a device, in the order of its host: plain values without costs.

kind                    name        stream  id      other          nbytes
op                      operator    of it   -       -              -          with ``tensors``
copy                    direction   of it   -       1: pinned      copied
collective              its kind    of it   group   coalesced      gathered, or to be reduced
record, wait            -           of it   event   -              -
alloc, free             -           owner   block   -              asked for
use                     -           user    block   -              -          ``record_stream``
host waits for event    why         -       event   -              -
host waits for stream   why         of it   -       -              -          ``... for device``: for all streams
query, pin, mark        -, -, phase -       -       -              -
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """One tensor of an operator. nbytes: what the operator touches, an expanded dimension once"""

    is_read: bool
    is_written: bool
    dtype: str
    nbytes: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the device was given. host_s: the time that the host took since the entry before"""

    kind: str
    name: str = ""
    stream: int = 0
    id: int = 0
    other: int = 0
    nbytes: int = 0
    tensors: tuple[Seen, ...] = ()
    host_s: float = 0.0


@dataclass(slots=True)
class Trace:
    """groups: the ranks of each process group, by its number"""

    entries: list[Entry]
    groups: Sequence[Ranks] = field(default_factory=list)


def steady(steps: Sequence[Trace]) -> list[Trace]:
    """Those of ``steps`` that do what the last one does, with the medians of their host times: the measuring host was not idle."""

    def shape(step: Trace) -> list[tuple[str, str, int]]:
        return [(entry.kind, entry.name, entry.stream) for entry in step.entries]

    last = shape(steps[-1])
    is_like_last = [shape(step) == last for step in steps]
    like_last = [step.entries for step, is_like in zip(steps, is_like_last, strict=True) if is_like]
    medians = [statistics.median(entry.host_s for entry in row) for row in zip(*like_last, strict=True)]

    def with_medians(step: Trace) -> Trace:
        entries = [replace(entry, host_s=host_s) for entry, host_s in zip(step.entries, medians, strict=True)]
        return Trace(entries, step.groups)

    return [with_medians(step) if is_like else step for step, is_like in zip(steps, is_like_last, strict=True)]
