"""Figures and tables to one HTML page, which needs no other file and no network."""

from __future__ import annotations

import html
import json
from pathlib import Path
from string import Template
from typing import Any

from ...errors import ArgumentError
from . import figures, tables
from .reading import Run
from .tables import Rows

TEMPLATE = Path(__file__).with_name("page.html")


def page_of(run: Run) -> str:
    """Raises: ArgumentError where plotly is not installed."""
    drawn = {
        "timeline": ("Timeline of a step", figures.timeline(run)),
        "memory": ("Memory over a step", figures.memory(run)),
        "steps": ("Steps", figures.steps(run)),
    }
    body = [f'<div class="tiles">{"".join(_tile(what, value) for what, value in tables.headline(run))}</div>']
    body.append(f"<p>{html.escape(tables.slowest(run))}</p>")
    num_ranks = len(run.ledgers.keys() | run.traces.keys())
    if num_ranks > figures.MAX_RANKS:
        body.append(f"<p>{figures.MAX_RANKS} of {num_ranks} ranks are drawn, the slowest first.</p>")
    body += [f'<h2>{title}</h2><div id="{name}"></div>' for name, (title, figure) in drawn.items() if figure is not None]
    body.append(_table("Memory by kind, the most at a time", ("kind", "measured", "planned"), tables.memory(run), first_number=1))
    headings = ("phase", "collective", "calls", "buffers", "sent by rank 0", "host waits, ms", "planned to send")
    body.append(_table("Communication of a step", headings, tables.communication(run), first_number=2))
    body.append(_findings(run))
    template = Template(TEMPLATE.read_text())
    found = {name: figure for name, (_, figure) in drawn.items() if figure is not None}
    return template.substitute(
        title=html.escape(f"fsdp2 report: {run.folder.resolve().name}"),
        about=html.escape(tables.about(run)),
        plotly=_plotly(),
        body="\n".join(body),
        figures=json.dumps(_escaped(found)).replace("<", "\\u003c"),
    )


def _escaped(figure: Any) -> Any:
    """``figure`` with its texts as plotly is to show them: it reads some of them as HTML."""
    if isinstance(figure, dict):
        return {key: value if key in _MARKED_UP else _escaped(value) for key, value in figure.items()}
    if isinstance(figure, list):
        return [_escaped(each) for each in figure]
    return html.escape(figure, quote=False) if isinstance(figure, str) else figure


_MARKED_UP = ("hovertemplate",)
"""Texts of figures that are HTML of ours."""


def _tile(what: str, value: str) -> str:
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(what)}</span></div>'


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


def _table(title: str, headings: tuple[str, ...], rows: Rows, first_number: int) -> str:
    if not rows:
        return ""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        classes = [' class="number"' if index >= first_number else "" for index in range(len(row))]
        return "<tr>" + "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(row, classes, strict=True)) + "</tr>"

    return f"<h2>{title}</h2><table>{cells('th', headings)}{''.join(cells('td', row) for row in rows)}</table>"


def _findings(run: Run) -> str:
    if not run.run:
        return ""
    found = run.run["findings"]
    said = []
    for each in found:
        where = f"\n    {', '.join(each['params'][:5])}" if each["params"] else ""
        text = f"[{each['severity']}] {each['check']}: {each['what']}{where}\n    why: {each['why']}\n    fix: {each['fix']}"
        said.append(f'<div class="finding {html.escape(each["severity"])}">{html.escape(text)}</div>')
    return "<h2>The doctor's findings</h2>" + ("".join(said) or "<p>none were given to the ledger</p>")
