"""Text for people: names from files and models can hold escape sequences, which a terminal would obey.

    printable("\\x1b[2Jlayers.0") == r"\\x1b[2Jlayers.0"

Every command prints through ``say``, and every error's text goes through ``printable``.
"""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    """``text`` with each character that Python's ``repr`` would escape written as its escape; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def say(text: str) -> None:
    """Print a line, or several, to standard output."""
    sys.stdout.write(printable(text) + "\n")
