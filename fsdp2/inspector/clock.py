"""How far this rank's clock is ahead of rank 0's, found from collectives. The second half is pure.

A collective in which each rank needs a word of all others is over on no rank before all others have entered it. So of each round that
ranks stamp, before and after, two bounds follow:

    rank 1 stamps (100, 130), rank 0 (0, 25): rank 1 is ahead by at least 100 - 25 and at most 130 - 0

The tightest of several rounds are taken, and the middle between them; half of their distance is how wrong that may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..inspect import exchange

ROUNDS = 8

Stamps = Sequence[tuple[int, int]]
"""(before, after) of each round, in ns."""


@dataclass(frozen=True)
class Offset:
    """ahead: ns of this rank's clock before rank 0's; uncertainty: it may be off by so much; start: rank 0's time at the measurement"""

    ahead: int
    uncertainty: int
    start: int


def measure(clock: Callable[[], int] = time.time_ns) -> Offset:
    """Collective: yes, over all ranks of the job."""
    stamps: list[tuple[int, int]] = []
    for _ in range(ROUNDS):
        before = clock()
        exchange(None)
        stamps.append((before, clock()))
    first = exchange(stamps)[0]
    return offset_from(stamps, first)


def offset_from(own: Stamps, first: Stamps) -> Offset:
    """The offset of the rank with the stamps ``own``; first: rank 0's stamps"""
    low = max(before - behind for (before, _), (_, behind) in zip(own, first, strict=True))
    high = min(behind - before for (_, behind), (before, _) in zip(own, first, strict=True))
    if low <= 0 <= high:  # one host's ranks have one clock, and others may
        return Offset(0, 0 if own == first else max(-low, high), first[0][0])
    return Offset((low + high) // 2, (high - low) // 2, first[0][0])
