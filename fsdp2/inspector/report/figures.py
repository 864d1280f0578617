"""Values to figures of plotly, as plain dicts: {"data": [...], "layout": {...}}.

Colors are readable on light and on dark pages; the page sets those of text and lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ..chrome import MAIN
from ..run_folder import Values
from .reading import Run, last_step
from .tables import own_ms

Figure = dict[str, Any]

COLORS = {
    "forward": "#4c8dd6",
    "backward": "#d98a3d",
    "optimizer": "#5aa469",
    "wait": "#c8553d",
    "all-gather": "#3fa7a1",
    "reduce-scatter": "#b565a7",
    "all-reduce": "#8f7fd6",
}
OTHER = "#9aa3ad"
MAX_RANKS = 16
"""How many ranks are drawn; of a larger job the slowest ones."""


def drawn(run: Run, ranks: Collection[int]) -> list[int]:
    """Of ``ranks`` those that are drawn: all in their order, or the slowest first."""
    if len(ranks) <= MAX_RANKS:
        return sorted(ranks)
    return [rank for rank in own_ms(run) if rank in ranks][:MAX_RANKS]


def timeline(run: Run) -> Figure | None:
    """Per rank: what the main thread does, and the collectives under way; the last step that was traced."""
    ranks = drawn(run, run.traces)
    if not ranks:
        return None
    begin, _ = last_step(run.traces[ranks[0]])
    bars: dict[str, dict[str, list[Any]]] = {}
    rows: list[str] = []
    for rank in ranks:
        for row, kind, name, at, lasts in _bars(run.traces[rank]):
            label = f"rank {rank}  {row}"
            if label not in rows:
                rows.append(label)
            if at < begin:
                continue
            bar = bars.setdefault(kind, {"base": [], "x": [], "y": [], "text": []})
            for key, value in (("base", (at - begin) / 1e3), ("x", lasts / 1e3), ("y", label), ("text", name)):
                bar[key].append(value)
    order = [f"rank {rank}  {row}" for rank in ranks for row in _ROWS if f"rank {rank}  {row}" in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "marker": {"color": COLORS.get(kind, OTHER)},
            "hovertemplate": "%{text}<br>%{x:.3f} ms at %{base:.3f} ms<extra></extra>",
            "textposition": "none",
            **bar,
        }
        for kind, bar in sorted(bars.items(), key=lambda each: [*COLORS, each[0]].index(each[0]))
    ]
    layout = {
        "barmode": "overlay",
        "height": 90 + 26 * len(order),
        "bargap": 0.25,
        "xaxis": {"title": {"text": "ms since forward began"}},
        "yaxis": {"categoryorder": "array", "categoryarray": order[::-1], "automargin": True},
    }
    return {"data": data, "layout": layout}


_ROWS = ("main thread", "all-gather", "reduce-scatter", "all-reduce", "other collectives")


def _bars(events: list[Values]) -> Iterable[tuple[str, str, str, float, float]]:
    """(row, kind, name, begin, length), in us."""
    ends = {each["id"]: each["ts"] for each in events if each["ph"] == "e"}
    for each in events:
        if each["ph"] == "X" and (each["tid"] == MAIN or each["cat"] == "optimizer"):
            yield "main thread", each["cat"], each["name"], each["ts"], each["dur"]
        elif each["ph"] == "b" and each["id"] in ends:
            row = each["cat"] if each["cat"] in _ROWS else "other collectives"
            yield row, each["cat"] if row != "other collectives" else row, each["name"], each["ts"], ends[each["id"]] - each["ts"]


def memory(run: Run) -> Figure | None:
    """Memory over the last traced step, on its lowest rank; the plan's bytes next to it."""
    if not run.traces:
        return None
    rank = min(run.traces)
    events = run.traces[rank]
    begin, end = last_step(events)
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in events:
        if each["ph"] == "C" and begin <= each["ts"] <= end:
            for kind, nbytes in each["args"].items():
                lines.setdefault(kind, []).append(((each["ts"] - begin) / 1e3, nbytes / 1e6))
    data: list[Values] = []
    for kind, color in zip(("allocated", "unsharded parameters", "all-gather buffers", "reduction buffers"), _LINES, strict=True):
        if kind in lines:
            at, values = zip(*sorted(lines[kind]), strict=True)
            data.append(_line(f"{kind}, measured", at, values, color))
    planned = _planned(run, events, begin, end)
    if planned is not None:
        data.append({**_line("allocated, planned", *planned, COLORS["wait"]), "line": {"shape": "hv", "dash": "dot", "width": 2.5}})
    layout = {
        "height": 360,
        "xaxis": {"title": {"text": f"ms since forward began, rank {rank}"}},
        "yaxis": {"title": {"text": "MB"}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout} if data else None


_LINES = ("#4c8dd6", "#5aa469", "#3fa7a1", "#b565a7")


def _line(name: str, x: Iterable[float], y: Iterable[float], color: str) -> Values:
    line = {"shape": "hv", "width": 1.8}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": line, "marker": {"color": color}}


def _planned(run: Run, events: list[Values], begin: float, end: float) -> tuple[list[float], list[float]] | None:
    """The plan's moments for each unit and phase, at the time at which it ran.

    Both lists are in the order of the step; the root runs between any two units, and a plan has a moment of it only where it allocates.
    """
    moments: list[tuple[tuple[str, str], int]] = []
    for each in (run.plan or {}).get("moments", ()):
        key = each["phase"], each["where"] or "the root"
        if moments and moments[-1][0] == key:
            moments[-1] = key, max(moments[-1][1], each["nbytes"])
        else:
            moments.append((key, each["nbytes"]))
    x: list[float] = []
    y: list[float] = []
    ahead = 0
    spans = [each for each in events if each["ph"] == "X" and each["tid"] == MAIN and each["ts"] >= begin]
    for span in sorted(spans, key=lambda each: each["ts"]):
        for index in range(ahead, min(ahead + 2, len(moments))):
            if moments[index][0] == (span["cat"], span["args"]["unit"]):
                ahead = index
                x.append((span["ts"] - begin) / 1e3)
                y.append(moments[index][1] / 1e6)
                break
    return ([*x, (end - begin) / 1e3], [*y, y[-1]]) if x else None


def steps(run: Run) -> Figure | None:
    """How long each step took, and how much of that the host waited."""
    if not run.ledgers:
        return None
    data = []
    for rank in drawn(run, run.ledgers):
        lines = run.ledgers[rank]
        at = [line["step"] for line in lines]
        for name, key, dash in ((f"rank {rank}", "duration_ms", "solid"), (f"rank {rank} waits", "exposed_ms", "dot")):
            line = _line(name, at, [each[key] for each in lines], _LINES[rank % 4])
            data.append({**line, "line": {"dash": dash, "width": 1.8}})
    axis = {"title": {"text": "ms"}, "rangemode": "tozero"}
    return {"data": data, "layout": {"height": 300, "xaxis": {"title": {"text": "step"}}, "yaxis": axis}}
