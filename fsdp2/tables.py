"""Tables for people: as plain text, or by rich on a terminal where it is installed."""

from __future__ import annotations

import html
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .printable import printable, say


@dataclass(frozen=True)
class Table:
    """left: the columns whose cells begin at the left, by number; the others end at the right, as numbers do"""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    left: Collection[int] = (0,)

    def __str__(self) -> str:
        rows: list[Sequence[str]] = [self.head, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.head))]
        lines = [self.title, *(self._line(row, widths) for row in rows)]
        return "\n".join(lines + ([f"  {self.note}"] if self.note else []))

    def _line(self, row: Iterable[str], widths: Sequence[int]) -> str:
        cells = [
            cell.ljust(width) if index in self.left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return ("  " + "  ".join(cells)).rstrip()

    def __rich__(self) -> Any:
        import rich.box
        import rich.table

        shown: Any = rich.table.Table(
            title=self.title, box=rich.box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption=self.note or None
        )
        shown.caption_justify = "left"
        for index, head in enumerate(self.head):
            shown.add_column(head, justify="left" if index in self.left else "right")
        for row in self.rows:
            shown.add_row(*map(printable, row))
        return shown


class Shown:
    """A result that looks in a prompt, and in a notebook, as ``print`` shows it."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def as_text(headline: str, tables: Iterable[Table]) -> str:
    return "\n\n".join([headline, *map(str, tables)])


def show(headline: str, tables: Sequence[Table]) -> None:
    """Print to standard output: by rich on a terminal; plain for programs and files, which have no width."""
    try:
        import rich.console
    except ImportError:
        say(as_text(headline, tables))
        return
    if not sys.stdout.isatty():
        say(as_text(headline, tables))
        return
    console = rich.console.Console()
    console.print(printable(headline))
    for table in tables:
        console.print(table)
