"""Values to rows of text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ...printable import in_bytes
from ..chrome import MAIN
from ..computing import BETWEEN
from ..run_folder import Values
from .reading import Run, last_step

Rows = list[tuple[str, ...]]

_PURPOSES = {"broadcast": "all-gather", "all_to_all": "reduce-scatter", "exchange": "reduce-scatter"}
"""The collectives by which gloo gathers and reduces, as a ledger calls them."""


def shown(nbytes: float | None) -> str:
    return "" if nbytes is None else in_bytes(nbytes)


def usual(lines: Sequence[Values]) -> Sequence[Values]:
    """The steps without the first two, if there are more: those make plans and optimizer state."""
    return lines[2:] or lines


def headline(run: Run) -> Rows:
    """The first table of the page: (name, value)."""
    rows: Rows = []
    lines = [line for each in run.ledgers.values() for line in usual(each)]
    if lines:
        duration = statistics.median(line["duration_ms"] for line in lines)
        rows.append(("step", f"{duration:.1f} ms"))
        tokens = statistics.median(line["tokens"] or 0 for line in lines)
        if tokens and duration:
            rows.append(("tokens/s, all ranks", f"{tokens * len(run.ledgers) / duration * 1e3:,.0f}"))
        rows.append(("exposed communication", f"{_share(lines, 'exposed_ms'):.0%}"))
        rows.append(("host time in hooks", f"{_share(lines, 'hooks_ms'):.1%}"))
    measured = measured_peak(run)
    if measured is not None:
        rows.append(("peak, measured", shown(measured)))
    if run.plan is not None:
        rows.append(("peak, planned", shown(run.plan["peak"]["nbytes"])))
    return rows


def own_ms(run: Run) -> dict[int, float]:
    """Of each rank, the slowest first: the usual time of a step without its waits. Who waits for a slow rank takes as long as it."""
    found = {}
    on_device = str(run.run.get("device", "cpu")) != "cpu"  # where the host waits for nobody
    for rank, lines in run.ledgers.items():
        computing = computing_ms(lines) if on_device else {}
        if computing:
            found[rank] = sum(computing.values())
        elif lines:
            found[rank] = statistics.median(line["duration_ms"] - line["exposed_ms"] for line in usual(lines))
    for rank, events in run.traces.items():
        if rank not in found:
            begin, _ = last_step(events)
            spans = [each for each in events if each["ph"] == "X" and each["ts"] >= begin]
            computes = [each["dur"] for each in spans if each["cat"] == "optimizer" or (each["tid"] == MAIN and each["cat"] != "wait")]
            found[rank] = sum(computes) / 1e3
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def computing_ms(lines: Sequence[Values]) -> dict[tuple[str, str], float]:
    """Of each phase and unit: how long it usually computes in a step."""
    steps = [line["computing_ms"] for line in usual(lines) if line.get("computing_ms")]
    keys = {(phase, unit): None for step in steps for phase, units in step.items() for unit in units}
    return {(phase, unit): statistics.median(step.get(phase, {}).get(unit, 0.0) for step in steps) for phase, unit in keys}


MUCH_SLOWER = 1.1
"""A rank is named from this multiple of the median on."""
MAX_NAMED = 8


def waited_for(run: Run) -> list[tuple[str, str, int, float, float]]:
    """(phase, unit, rank, its ms, those of the median rank) where others wait for a rank that computes longer, the longest first.

    A difference of less than a hundredth of a step is none. Between forward and backward a rank may wait in a collective of the
    program's own, which nobody times: it counts there only if its whole step without waits takes longer.
    """
    found = {rank: computing_ms(lines) for rank, lines in run.ledgers.items() if lines}
    own = own_ms(run)
    median_own = statistics.median(own.values()) if found else 0.0
    least = median_own / 100
    rows = []
    for phase, unit in {key: None for each in found.values() for key in each}:
        ms = {rank: each.get((phase, unit), 0.0) for rank, each in found.items()}
        rank, median = max(ms, key=ms.__getitem__), statistics.median_low(ms.values())
        is_slow = phase != BETWEEN or own[rank] > max(MUCH_SLOWER * median_own, median_own + least)
        if is_slow and ms[rank] > max(MUCH_SLOWER * median, median + least):
            rows.append((phase, unit, rank, ms[rank], median))
    return sorted(rows, key=lambda row: row[4] - row[3])


def slow_ranks(run: Run) -> list[str]:
    """The ranks for which others wait, and where: "rank 1 with 52.1 ms, most of it in forward of layers.2"."""
    own = own_ms(run)
    slow = [rank for rank, ms in own.items() if ms > MUCH_SLOWER * statistics.median(own.values())]
    where = {rank: f", most of it in {place(phase, unit)}" for phase, unit, rank, *_ in reversed(waited_for(run))}
    more = [f"{len(slow) - MAX_NAMED} more"] if len(slow) > MAX_NAMED else []
    return [f"rank {rank} with {own[rank]:.1f} ms{where.get(rank, '')}" for rank in slow[:MAX_NAMED]] + more


def place(phase: str, unit: str) -> str:
    return f"{phase} of {unit}" if unit else "data, optimizer or other code of the program"


def slowest(run: Run) -> str:
    """A line that names the ranks for which others wait; "" of one rank."""
    own = own_ms(run)
    if len(own) < 2:
        return ""
    said = "; ".join(slow_ranks(run)) or "none"
    median = statistics.median(own.values())
    return f"Slow ranks, by a step's time without waits: {said}; the median of {len(own)} ranks is {median:.1f} ms."


def _share(lines: Sequence[Values], key: str) -> float:
    duration = sum(line["duration_ms"] for line in lines)
    return float(sum(line[key] for line in lines) / duration) if duration else 0.0


def measured_peak(run: Run) -> int | None:
    """Bytes on the rank that has most: in a step of the ledger, or in the last traced one."""
    peaks = [line["allocator_peak"] for lines in run.ledgers.values() for line in lines if line["allocator_peak"] is not None]
    for events in run.traces.values():
        begin, _ = last_step(events)
        counts = [each["args"] for each in events if each["ph"] == "C" and each["ts"] >= begin]
        peaks += [each["allocated"] for each in counts if "allocated" in each]
    return max(peaks, default=None)


def memory(run: Run) -> Rows:
    """(kind, measured, planned): the most at a time."""
    measured: dict[str, int] = {}
    for lines in run.ledgers.values():
        for line in lines:
            for kind, nbytes in line["memory"].items():
                measured[kind] = max(measured.get(kind, 0), nbytes)
    planned = {} if run.plan is None else run.plan["most"]
    kinds = [*measured, *(kind for kind in planned if kind not in measured)]
    return [(kind, shown(measured.get(kind)), shown(planned.get(kind))) for kind in kinds]


def communication(run: Run) -> Rows:
    """(phase, collective, calls, buffers, sent, exposed ms, planned: sent) of a step, rank 0."""
    if not run.ledgers:
        return []
    lines = usual(run.ledgers[min(run.ledgers)])
    if not lines:
        return []
    found: dict[tuple[str, str], list[Values]] = {}
    for line in lines:
        for phase, kinds in line["communication"].items():
            for kind, said in kinds.items():
                found.setdefault((phase, kind), []).append(said)
    planned: dict[tuple[str, str], int] = {}
    for each in () if run.plan is None else run.plan["traffic"]:
        kind = str(each["kind"])
        purpose = str(each["phase"]), _PURPOSES.get(kind, kind.replace("_", "-"))
        planned[purpose] = planned.get(purpose, 0) + each["sent"]
    rows: Rows = []
    for (phase, kind), said in found.items():
        of_plan = shown(planned.get((phase, kind)))

        def mean(key: str, said: list[Values] = said) -> float:
            return float(sum(each[key] for each in said) / len(lines))

        calls = f"{mean('calls'):.3g}"
        rows.append((phase, kind, calls, shown(mean("nbytes")), shown(mean("sent")), f"{mean('exposed_ms'):.2f}", of_plan))
    return rows


def about(run: Run) -> str:
    said: dict[str, Any] = run.run
    if not said:
        return f"{len(run.traces)} ranks"
    text = f"{said['model']} on {said['ranks']} x {said['device'].split(':')[0]}, torch {said['torch']}, fsdp2 {said['fsdp2']}"
    resumed = said.get("resumed")
    return text if not resumed else f"{text}. Goes on after step {resumed['step']} from {resumed['source']}. {resumed['lost']}"
