"""Tables as plain text, which ``command`` may print more beautifully."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """has_numbers: all columns but the first stand at the right; else they are words, and begin at the left"""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    has_numbers: bool = True


def gb(nbytes: float) -> str:
    """Decimal, with three digits that count: ``gb(1.5e9) == "1.50 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            digits = 2 if nbytes < 10 * size else 1
            return f"{nbytes / size:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def as_text(headline: str, tables: Iterable[Table]) -> str:
    return "\n\n".join([headline, *map(_plain, tables)])


def _plain(table: Table) -> str:
    rows: list[Sequence[str]] = [table.head, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    lines = [table.title, *(_line(row, widths, table.has_numbers) for row in rows)]
    return "\n".join(lines + ([f"  {table.note}"] if table.note else []))


def _line(row: Iterable[str], widths: Sequence[int], has_numbers: bool) -> str:
    cells = [
        cell.rjust(width) if has_numbers and index > 0 else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return ("  " + "  ".join(cells)).rstrip()
