"""The files of a run's folder, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import ArgumentError
from ..expected import LEDGER_LINE, RUN, TRACE
from ..run_folder import Values, rank_files, read_json, read_lines


@dataclass(frozen=True)
class Run:
    """run: of run.json, {} where no ledger was kept; ledgers: lines by rank; traces: events by rank"""

    folder: Path
    run: Values
    ledgers: dict[int, list[Values]]
    traces: dict[int, list[Values]]

    @property
    def plan(self) -> Values | None:
        """The arguments of the ledger."""
        plan: Values | None = self.run.get("plan")
        return plan


def read_run(folder: Path) -> Run:
    """Raises: ArgumentError where nothing was written down, or a file is broken."""
    about = folder / "run.json"
    found = Run(
        folder,
        read_json(about, RUN) if about.exists() else {},
        {rank: read_lines(path, LEDGER_LINE) for rank, path in rank_files(folder, "ledger", "jsonl")},
        {rank: read_json(path, TRACE)["traceEvents"] for rank, path in rank_files(folder, "trace", "json")},
    )
    if not found.ledgers and not found.traces:
        raise ArgumentError(
            f"report found neither a ledger nor a trace in {folder}",
            expected="the folder that fsdp2.ledger, or fsdp2.trace, was given",
            fix='train with: with fsdp2.ledger("run", model, optimizer): ...',
        )
    return found


def last_step(events: list[Values]) -> tuple[float, float]:
    """When the last whole step of a rank's events begins and ends, in us: from its forward to the end of the trace."""
    spans = [each for each in events if each["ph"] == "X"]
    forwards = [each["ts"] for each in spans if each["name"] == "forward"]
    return (max(forwards) if forwards else 0.0), max((each["ts"] + each["dur"] for each in spans), default=0.0)
