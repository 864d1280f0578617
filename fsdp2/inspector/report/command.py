"""``fsdp2 report DIR``: what a run has written down, as one HTML page.

fsdp2 report run --output run.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .page import page_of
from .reading import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what fsdp2.ledger, or fsdp2.trace, was given")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: DIR/report.html")


def run(options: argparse.Namespace) -> int:
    """Write the page, and print where. Returns 0. Raises: ArgumentError where there is nothing to show, or without plotly"""
    output: Path = options.output or options.folder / "report.html"
    output.write_text(page_of(read_run(options.folder)))
    sys.stdout.write(f"{output}\n")
    return 0
