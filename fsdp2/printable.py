"""Text for people: names from files and models can hold escape sequences, which a terminal would obey.

    printable("\\x1b[2Jlayers.0") == r"\\x1b[2Jlayers.0"

Every command prints through ``say``, and every error's text goes through ``printable``. Bytes, counts and ranks read the same
everywhere: ``in_bytes``, ``counted``, ``of_ranks``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def printable(text: str) -> str:
    """``text`` with each character that Python's ``repr`` would escape written as its escape; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def in_bytes(nbytes: float) -> str:
    """Decimal units, as GPUs are sold, with three digits that count: ``in_bytes(1.5e9) == "1.50 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            digits = 2 if nbytes < 10 * size else 1
            return f"{nbytes / size:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def counted(number: int, what: str) -> str:
    """``counted(2, "group") == "2 groups"``"""
    return f"{number} {what}{'' if number == 1 else 's'}"


def of_ranks(ranks: Iterable[int]) -> str:
    """``of_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"``"""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    names = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans]
    return f"{'rank' if sum(map(len, spans)) == 1 else 'ranks'} {', '.join(names)}"


def alike(said: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """``alike({0: "a", 1: "b", 2: "a"}) == [("a", [0, 2]), ("b", [1])]``: what ranks say, and which say it, the lowest rank first."""
    found: dict[T, list[int]] = {}
    for rank in sorted(said):
        found.setdefault(said[rank], []).append(rank)
    return list(found.items())


def say(text: str) -> None:
    """Print a line, or several, to standard output."""
    sys.stdout.write(printable(text) + "\n")


def say_json(value: Any) -> None:
    """Print ``value`` as one line of JSON: dataclasses as objects, numbers that JSON lacks (NaN, infinity) as text."""
    say(json.dumps(_of_json(value), default=str, allow_nan=False))


def _of_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _of_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _of_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_of_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
