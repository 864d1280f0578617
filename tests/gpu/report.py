"""What the checks came to, for a reader and for whoever the report is sent to: a table, JSON, and markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.running import Row

PARTS = {1: "one device", 2: "several devices", 3: "measurements"}
SEND = (
    "Please attach {names} to an issue of the repository that you took fsdp2 from, whether all passed or not. They hold this table, "
    "the versions of torch, CUDA and NCCL, the GPU's name, and what failing checks printed, in which paths of this computer may stand."
)


def show_table(rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Print it with rich, or plainly without."""
    title = ", ".join(f"{name} {value}" for name, value in about.items())
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for row in rows:
            print(f"{row.status:4}  {row.name}  {row.seconds:.1f} s  {_note(row)}")
    else:
        table = Table(title=title)
        for heading in ("part", "check", "result", "s", ""):
            table.add_column(heading, overflow="fold")
        colors = {"pass": "green", "fail": "bold red", "skip": "yellow"}
        for row in rows:
            result = f"[{colors[row.status]}]{row.status}[/]"
            table.add_row(PARTS[row.part], row.title, result, f"{row.seconds:.1f}", _note(row).replace("[", r"\["))
        Console(width=140).print(table)
    print(summary(rows))


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped"


def in_words(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """One line: what was shown, what is wrong, and what was not shown. A kind of check is shown if all of its rows passed."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(row.kind, set()).add(row.status)
    wrong = [kind for kind, statuses in kinds.items() if "fail" in statuses]
    shown = [kind for kind, statuses in kinds.items() if statuses == {"pass"}]
    partly = [kind for kind, statuses in kinds.items() if statuses == {"pass", "skip"}]
    left = [kind for kind, statuses in kinds.items() if statuses == {"skip"}]
    parts = [("WRONG", wrong), ("shown", shown), ("shown in part", partly), ("not shown", left)]
    said = ". ".join(f"{label[0].upper()}{label[1:]}: {'; '.join(found)}" for label, found in parts if found)
    return f"On {about.get('devices', 1)} x {about.get('gpu', about.get('device', 'a device'))}. {said}."


def write(rows: Sequence[Row], about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write results.json and results.md, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = folder / "results.json", folder / "results.md"
    as_json.write_text(
        json.dumps({"about": dict(about), "rows": [{**vars(row), "figures": dict(row.figures)} for row in rows]}, indent=1)
    )
    as_markdown.write_text(markdown(rows, about))
    return [as_json, as_markdown]


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    lines = [
        "# fsdp2 on a device",
        "",
        in_words(rows, about),
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        summary(rows),
        "",
    ]
    lines += ["| part | check | result | s | |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {PARTS[row.part]} | {_cell(row.title)} | {row.status} | {row.seconds:.1f} | {_cell(_note(row))} |" for row in rows]
    for row in rows:
        if row.status == "fail":
            lines += ["", f"## {row.title}", "", "```", row.text.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/")


def _note(row: Row) -> str:
    """One line: why not, or the figures."""
    if row.status != "pass":
        return (row.text.splitlines() or [""])[0]
    return ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.figures.items())


__all__ = ["SEND", "in_words", "markdown", "show_table", "summary", "write"]
