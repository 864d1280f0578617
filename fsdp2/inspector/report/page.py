"""Figures and tables to one HTML page (page.html), which needs no other file and no network."""

from __future__ import annotations

import functools
import html
from pathlib import Path
from typing import Any

import jinja2

from ...doctor.finding import Finding
from ...errors import ArgumentError
from ..run_folder import Values
from . import figures, tables
from .reading import Run

TEMPLATE = Path(__file__).with_name("page.html")


def page_of(run: Run) -> str:
    """Raises: ArgumentError where plotly is not installed."""
    drawn = {"timeline": figures.timeline(run), "memory": figures.memory(run), "steps": figures.steps(run)}
    page: str = _template().render(
        title=f"fsdp2 report: {run.folder.resolve().name}",
        about=tables.about(run),
        plotly=_plotly(),
        tiles=tables.headline(run),
        slowest=tables.slowest(run),
        num_ranks=len(run.ledgers.keys() | run.traces.keys()),
        max_ranks=figures.MAX_RANKS,
        figures={name: _escaped(figure) for name, figure in drawn.items() if figure is not None},
        memory=tables.memory(run),
        communication=tables.communication(run),
        waited_for=[
            (tables.place(phase, unit), f"rank {rank}", f"{ms:.2f}", f"{median:.2f}")
            for phase, unit, rank, ms, median in tables.waited_for(run)[: tables.MAX_NAMED]
        ],
        findings=[_finding(each) for each in run.run["findings"]] if run.run else None,
    )
    return page


@functools.cache
def _template() -> jinja2.Template:
    template: jinja2.Template = jinja2.Template(
        TEMPLATE.read_text(), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    return template


def _finding(said: Values) -> Finding:
    """As the doctor prints it."""
    return Finding(said["check"], said["severity"], said["what"], said["why"], said["fix"], tuple(said["params"]))


def _escaped(figure: Any) -> Any:
    """``figure`` with its texts as plotly is to show them: it reads some of them as HTML."""
    if isinstance(figure, dict):
        return {key: value if key in _MARKED_UP else _escaped(value) for key, value in figure.items()}
    if isinstance(figure, list):
        return [_escaped(each) for each in figure]
    return html.escape(figure, quote=False) if isinstance(figure, str) else figure


_MARKED_UP = ("hovertemplate",)
"""Texts of figures that are HTML of ours."""


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise ArgumentError(
            "fsdp2 report draws with plotly, which is not installed",
            expected="the libraries of the extra `report`",
            fix="pip install 'fsdp2[report]'",
        ) from None
    text: str = get_plotlyjs()
    return text
