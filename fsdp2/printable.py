"""Text for people: names from files and models can hold escape sequences, which a terminal would obey.

    printable("\\x1b[2Jlayers.0") == r"\\x1b[2Jlayers.0"

Every command prints through ``say``, and every error's text goes through ``printable``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any


def printable(text: str) -> str:
    """``text`` with each character that Python's ``repr`` would escape written as its escape; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


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
