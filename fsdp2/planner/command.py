"""``fsdp2 plan``: plan a training run from the command line. Most options are the fields of ``Setting``.

$ fsdp2 plan llama3-70b --ranks 64 --batch 1 --sequence 8192 --checkpointing full
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from ..arguments import COUNT, POSITIVE, word_of
from ..errors import ArgumentError
from ..printable import say_json
from ..tables import Table, show
from ..testing.clock.cards import CARDS
from .api import plan_of
from .card_file import card_named
from .measure import measure_in_ranks
from .proposals import Found, words_of
from .result import Plan, headline, tables
from .script import of_script
from .search import search
from .setting import Setting
from .shapes import SHAPES, named
from .tiers import OFFLOADS

_PATIENCE_S = 1.0
"""A search that takes less than this says nothing before it has found."""
_PATIENCE_OF_FILES_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 plan``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{', '.join(SHAPES)}; hf:CONFIG.json; package.module:function, which returns a module; or a training script, SCRIPT.py",
    )
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same as MODEL")
    parser.add_argument(
        "--arguments", metavar="ARGS", default="", help='the arguments of SCRIPT.py in one string: "--config large.toml"'
    )
    parser.add_argument("--ranks", dest="world_size", type=word_of(COUNT), metavar="N", help="number of ranks (required for a plan)")
    for each in fields(Setting):
        if "option" in each.metadata:
            option = parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **each.metadata["option"])
            if each.default is not None:
                option.help = f"{option.help} (default: %(default)s)"
    offload = parser.add_mutually_exclusive_group()
    for place, kept in OFFLOADS.items():
        if place:
            flag = "--offload" if place is True else f"--offload-{place}"
            offload.add_argument(flag, dest="offload", action="store_const", const=place, default=Setting.offload, help=f"keep {kept}")
    parser.add_argument(
        "--inputs",
        metavar="package.module:function",
        help="a function from batch and sequence to the model's arguments (default: token ids)",
    )
    parser.add_argument("--search", action="store_true", help="propose settings that fit the GPU's memory, the fastest first")
    parser.add_argument(
        "--memory-limit",
        type=word_of(POSITIVE, float),
        metavar="GB",
        help="with --search: memory per rank (default: nine tenths of the card's)",
    )
    parser.add_argument(
        "--card",
        metavar="GPU",
        help=f"also predict the time of a step on this GPU: {', '.join(CARDS)}, or a file written by --measure",
    )
    parser.add_argument("--measure", type=Path, metavar="FILE", help="plan nothing: measure this machine, and write a file for --card")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object, in bytes and seconds")


def run(options: argparse.Namespace) -> int:
    """Print the plan, or the result of a search. Returns 0, or the status of ranks that were to measure."""
    if options.measure is not None:
        return measure_in_ranks(options.measure)
    model = options.model or options.named_model
    if model is None or options.world_size is None:
        raise ArgumentError(
            "a plan needs a model and a number of ranks", expected="both", fix="for instance: fsdp2 plan llama3-8b --ranks 16"
        )
    card = None if options.card is None else card_named(options.card)
    setting = Setting(**{each.name: getattr(options, each.name) for each in fields(Setting)})
    if model.endswith(".py"):
        workload, setting = of_script(model, shlex.split(options.arguments), setting)
    else:
        workload = named(model, options.inputs)
    if options.search:
        limit = None if options.memory_limit is None else options.memory_limit * 1e9
        with _progress() as on_candidate:
            found = search(workload, setting, card, memory_limit=limit, on_candidate=on_candidate)
        return _print(found, headline(found.asked.plan), found.tables, options.json)
    planned = plan_of(workload, setting, card)
    return _print(planned, headline(planned), tables(planned), options.json)


def _print(result: Plan | Found, title: str, found: Sequence[Table], as_json: bool) -> int:
    if as_json:
        say_json(result)
    else:
        show(title, found)
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, dict[str, str]], None]]:
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
        if time.monotonic() - begin < (_PATIENCE_S if is_terminal else _PATIENCE_OF_FILES_S):
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
