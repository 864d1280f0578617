"""``fsdp2 report DIR``: the records of a run, as one HTML page that needs nothing else.

reading    the files of a run's folder, as values
figures    values to figures of plotly, as plain dicts
tables     values to rows of text
page       figures and tables to HTML
command    the command
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .page import page_of
from .reading import read_run
from .tables import measured_peak, slow_ranks


@dataclass(frozen=True)
class Report:
    """page: the file; peak: the most bytes of a rank that were measured, if anything could; slow: the ranks that others wait for"""

    page: Path
    peak: int | None
    slow: tuple[str, ...] = ()


def write_report(folder: Path, output: Path | None = None) -> Report:
    """Write the page of the run in ``folder`` to ``output``; None: to report.html there.

    Collective: no; one rank calls it.
    Raises:     ArgumentError where there is nothing to show, or without plotly
    """
    page, run = output or folder / "report.html", read_run(folder)
    page.write_text(page_of(run), encoding="utf-8", errors="replace")
    return Report(page, measured_peak(run), tuple(slow_ranks(run)))
