"""``fsdp2 search``: propose settings that fit, the fastest first.

$ fsdp2 search llama3-8b --ranks 16 --param-dtype bf16 --reduce-dtype fp32 --card h100
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator

from ..arguments import POSITIVE, word_of
from .command import add_workload, asked_for, shown
from .proposals import words_of
from .result import headline
from .search import search

_PATIENCE_S = 1.0
"""A search that takes less than this says nothing before it has found."""
_PATIENCE_OF_FILES_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 search``."""
    add_workload(parser)
    parser.add_argument(
        "--memory-limit", type=word_of(POSITIVE, float), metavar="GB", help="memory per rank (default: nine tenths of the card's)"
    )


def run(options: argparse.Namespace) -> int:
    workload, setting, card = asked_for(options)
    limit = None if options.memory_limit is None else options.memory_limit * 1e9
    with _progress(options.quiet) as on_candidate:
        found = search(workload, setting, card, memory_limit=limit, on_candidate=on_candidate)
    return shown(options, found, headline(found.asked.plan), found.tables)


@contextlib.contextmanager
def _progress(is_quiet: bool) -> Iterator[Callable[[int, dict[str, str]], None]]:
    """A function that says on the error output which candidate is planned: on a terminal after a second, else a line each 10 s."""
    begin, width = time.monotonic(), 0
    is_terminal = sys.stderr.isatty()

    def show_line(line: str) -> None:
        nonlocal width
        sys.stderr.write(f"\r{line.ljust(width)}")
        sys.stderr.flush()
        width = len(line)

    def on_candidate(number: int, changes: dict[str, str]) -> None:
        nonlocal begin
        if is_quiet or time.monotonic() - begin < (_PATIENCE_S if is_terminal else _PATIENCE_OF_FILES_S):
            return
        line = f"tried {number} settings; now: {words_of(changes) or 'as asked'}"
        if is_terminal:
            show_line(line[: shutil.get_terminal_size().columns - 1])
        else:
            begin = time.monotonic()
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    try:
        yield on_candidate
    finally:
        if width:
            show_line("")
            sys.stderr.write("\r")
