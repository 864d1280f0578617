"""Bytes communicated in a step that was written down, by phase, kind and link. Pure functions.

Of a ring over n ranks every rank sends (n - 1) / n of the buffer, of an all-reduce twice that. In an exchange, one round of a pairwise
reduce-scatter, it sends the whole buffer to one other rank. A ring that lies within a host uses the
links between its devices; one over several hosts also crosses a link between hosts once for each host, with the same bytes.

Worked example: 16 MB are gathered over 16 ranks on 2 hosts of 8. Each rank sends 15 MB to its neighbor; of each host one rank's 15 MB
leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..testing.clock.trace import Entry, Ranks


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in one phase. launches: of collectives; sent: bytes by one rank; leaves_host: bytes by one host"""

    phase: str
    kind: str
    ranks: int
    launches: int
    sent: int
    leaves_host: int


def traffic_of(entries: Sequence[Entry], groups: Sequence[Ranks], ranks_per_host: int) -> tuple[Traffic, ...]:
    """The collectives in the order in which they first occur."""
    found: dict[tuple[str, str, int], list[int]] = {}
    phase = ""
    for entry in entries:
        if entry.kind == "mark":
            phase = entry.name
        elif entry.kind == "collective":
            ranks = groups[entry.id]
            total = found.setdefault((phase, entry.name, len(ranks)), [0, 0, 0])
            sent = sent_by_each(entry.name, entry.nbytes, len(ranks))
            total[0] += 1
            total[1] += sent
            rings = rings_that_leave(ranks, ranks_per_host)
            total[2] += sent * rings
    return tuple(Traffic(*which, *total) for which, total in found.items())


def sent_by_each(kind: str, nbytes: int, size: int) -> int:
    """Bytes that one rank sends around a ring of ``size``: of a broadcast, the mean of all ranks (the last one sends nothing)."""
    if kind == "exchange":
        return nbytes
    return nbytes * (size - 1) // size * (2 if kind == "all_reduce" else 1)


def rings_that_leave(ranks: Ranks, ranks_per_host: int) -> int:
    """How many rings like that over ``ranks`` cross the network of one host at a time; each rank of the host has one of these.

    Ranks 0, 8, 16, ... of hosts of 8 are one ring of eight such: all eight cross.
    """
    hosts = {rank // ranks_per_host for rank in ranks}
    if len(hosts) == 1:
        return 0
    return max(ranks_per_host // max(len(ranks) // len(hosts), 1), 1)
