"""``fsdp2 report DIR``: the records of a run, as one HTML page.

fsdp2 report run --output run.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...arguments import PLACE, word_of
from ...printable import say
from . import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what fsdp2.ledger, or fsdp2.trace, was given")
    parser.add_argument("--output", type=word_of(PLACE, Path), metavar="FILE", help="default: DIR/report.html")


def run(options: argparse.Namespace) -> int:
    """Write the page, and print where, and which ranks others wait for. Returns 0.

    Raises: ArgumentError where there is nothing to show, or without plotly
    """
    report = write_report(options.folder, options.output)
    say(str(report.page))
    for each in report.slow:
        say(f"slow: {each}")
    return 0
