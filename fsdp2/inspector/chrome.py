"""Spans and samples as events of Chrome's trace format, which https://ui.perfetto.dev opens. Pure.

A rank is a process with two rows, "phases" and "main thread", a row of asynchronous ranges for each kind of collective, and a counter
of bytes. Times are microseconds since the trace began on rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .clock import Offset
from .moments import Sample, Span

Event = dict[str, Any]
PHASES, MAIN = 1, 2
"""Numbers of rows."""


def events_of(rank: int, spans: Iterable[Span], samples: Sequence[Sample], offset: Offset) -> list[Event]:
    def at(ns: int) -> float:
        return (ns - offset.ahead - offset.start) / 1e3

    events: list[Event] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        {"ph": "M", "pid": rank, "tid": PHASES, "name": "thread_name", "args": {"name": "phases"}},
        {"ph": "M", "pid": rank, "tid": MAIN, "name": "thread_name", "args": {"name": "main thread"}},
    ]
    for number, span in enumerate(spans):
        name = " ".join([span.kind, "for" if span.kind == "wait" else "of", span.unit] if span.unit else [span.kind])
        if span.row == "collective":
            common = {"pid": rank, "tid": MAIN, "cat": span.kind, "id": f"{rank}.{number}", "name": name}
            said = {"nbytes": span.nbytes, "unit": span.unit, "phase": span.phase}
            events.append({"ph": "b", "ts": at(span.begin), "args": said, **common})
            events.append({"ph": "e", "ts": at(span.end), **common})
        else:
            row = PHASES if span.row == "phase" else MAIN
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": row,
                    "cat": span.kind,
                    "name": name,
                    "ts": at(span.begin),
                    "dur": (span.end - span.begin) / 1e3,
                    "args": {"unit": span.unit, "phase": span.phase},
                }
            )
    return events + [{"ph": "C", "pid": rank, "name": "bytes", "ts": at(each.at), "args": each.nbytes} for each in samples]
