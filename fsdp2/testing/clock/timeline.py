"""A trace on a clock: when each entry begins and ends, in virtual time.

The host goes through the trace in order; each entry costs it the time that was measured before the entry, and a stated constant. An
operator begins when the host has launched it, its stream has come to it, and everything that the stream waits for has ended.
Collectives of one process group run in the order of issue, on whichever streams. While one runs, it takes some multiprocessors from
operators (``Card.collectives_take``).

Worked example: the host launches two kernels of 5 ms on one stream, at 0 and 1 ms, and one of 2 ms at 2 ms on another stream that
waits for an event after the first. They run from 0 to 5, from 5 to 10, and from 5 to 7 ms.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import costs
from .caching import CachingAllocator
from .cards import Card
from .trace import Entry, Ranks

COMPUTE = 0
"""The default stream, on which the user's kernels run."""


@dataclass(frozen=True, slots=True)
class Span:
    """An entry that ran on ``stream`` from ``start`` to ``stop``. issued: when the host had launched it"""

    stream: int
    start: float
    stop: float
    issued: float
    entry: Entry
    phase: str


@dataclass(slots=True)
class Clock:
    """Virtual time of the host and of all streams, and the allocator, which frees late what streams still use.

    host: now; host_works: the seconds, by phase, in which it did not wait
    """

    card: Card
    groups: Sequence[Ranks] = ()
    host: float = 0.0
    host_works: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)
    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    phase: str = ""
    _streams: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _events: dict[int, float] = field(default_factory=dict)
    _in_group: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _used_on: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _collectives: deque[tuple[float, float]] = field(default_factory=deque)  # when those run that operators may still meet

    @property
    def end(self) -> float:
        """When everything so far is done."""
        return max(self.host, *self._streams.values()) if self._streams else self.host

    def run(self, entries: Iterable[Entry]) -> None:
        """The next ``entries``."""
        for entry in entries:
            self._run(entry)

    def _run(self, entry: Entry) -> None:
        host = self.card.host
        kind = entry.kind
        self._host_works(entry.host_s)
        if kind == "op":
            self._host_works(host.operator)
            self._put(entry, costs.operator_seconds(entry, self.card), is_slowed=True)
        elif kind == "copy":
            self._host_works(host.operator)
            self._put(entry, costs.copy_seconds(entry, self.card))
        elif kind == "collective":
            self._host_works(host.collective + host.coalesced * (entry.other - 1))
            seconds = costs.collective_seconds(entry.name, entry.nbytes, self.groups[entry.id], self.card)
            stop = self._in_group[entry.id] = self._put(entry, seconds, not_before=self._in_group[entry.id])
            if len(self.groups[entry.id]) > 1:
                bisect.insort(self._collectives, (stop - seconds, stop))
        elif kind == "record":
            self._host_works(host.event)
            self._events[entry.id] = self._streams[entry.stream]
        elif kind == "wait":
            self._host_works(host.event)
            self._streams[entry.stream] = max(self._streams[entry.stream], self._events.get(entry.id, 0.0))
        elif kind == "alloc":
            self._host_works(host.memory)
            self.allocator.alloc(entry.id, entry.nbytes, entry.stream, self.host)
        elif kind == "free":
            self._host_works(host.memory)
            streams = self._used_on.pop(entry.id, set()) - {entry.stream}
            self._host_works(host.event * len(streams))
            self.allocator.free(entry.id, max(self._streams[stream] for stream in streams) if streams else None)
        elif kind == "use":
            self._used_on[entry.id].add(entry.stream)
        elif kind == "host waits for event":
            self.host = max(self.host, self._events.get(entry.id, 0.0))
        elif kind == "host waits for stream":
            self.host = max(self.host, self._streams[entry.stream])
        elif kind == "host waits for device":
            self.host = self.end
        elif kind == "mark":
            self.phase = entry.name

    def _host_works(self, seconds: float) -> None:
        self.host += seconds
        self.host_works[self.phase] += seconds

    def _put(self, entry: Entry, seconds: float, not_before: float = 0.0, is_slowed: bool = False) -> float:
        start = max(self._streams[entry.stream], self.host + self.card.launch_s, not_before)
        stop = self._streams[entry.stream] = start + (self._slowed(start, seconds) if is_slowed else seconds)
        self.spans.append(Span(entry.stream, start, stop, self.host, entry, self.phase))
        return stop

    def _slowed(self, start: float, seconds: float) -> float:
        """How long an operator of ``seconds`` takes from ``start`` on, next to the collectives that were issued before it."""
        running = self._collectives
        while running and running[0][1] <= self._streams[COMPUTE]:
            running.popleft()
        rate, now, left = 1.0 - self.card.collectives_take, start, seconds
        for begin, end in running:
            if end <= now:
                continue
            alone = max(begin - now, 0.0)
            if left <= alone:
                break
            left -= alone
            now = max(now, begin)
            shared = min(end - now, left / rate)
            now += shared
            left -= shared * rate
        return now + left - start
