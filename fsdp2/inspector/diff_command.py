"""``fsdp2 diff RUN_A RUN_B``: where two runs that ``fsdp2.record`` wrote down first differ, and whether by more than rounding.

fsdp2 diff runs/monday runs/tuesday
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import add_format
from ..errors import ArgumentError
from ..printable import say, say_json
from .difference import Lines, common_steps, differences
from .expected import RECORD_LINE
from .run_folder import rank_files, read_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="RUN_A", help="a folder that fsdp2.record was given")
    parser.add_argument("second", type=Path, metavar="RUN_B", help="another one")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    """1 if they differ, as diff does; else 0. Raises: ArgumentError where there is nothing to compare"""
    first, second = _recorded(options.first), _recorded(options.second)
    steps = common_steps(first, second)
    if not steps:
        raise ArgumentError(
            f"{options.first} and {options.second} have no step in common",
            expected="steps that all ranks of both runs have recorded",
            fix="record both with the same first_step= and every=",
        )
    found = list(differences(first, second))
    made_by = [_made_by(lines) for lines in (first, second)]
    if options.format == "json":
        say_json({"steps": steps, "differences": found})
        return 1 if found else 0
    if made_by[0] != made_by[1]:
        say(f"first run: {made_by[0]}; second run: {made_by[1]}")
    for each in found[:1]:
        say(str(each))
        if each.only_in:
            common = next((other for other in found if not other.only_in), None)
            say(f"among the parameters that both recorded: {common or 'no bit differs'}")
        more = next((other for other in found if not other.is_rounding), None)
        if each.is_rounding:
            say(f"first by more than rounding: {more}" if more else "nothing differs by more than rounding")
    if not found:
        say(f"no bit differs in steps {steps[0]} to {steps[-1]}")
    return 1 if found else 0


def _made_by(lines: Lines) -> str:
    (line, *_), *_ = lines.values()
    return f"{line.get('made_by', 'unknown')} on torch {line.get('torch', 'unknown')}"


def _recorded(folder: Path) -> Lines:
    found = {rank: read_lines(path, RECORD_LINE) for rank, path in rank_files(folder, "record", "jsonl")}
    if not found:
        raise ArgumentError(
            f"diff found no recording in {folder}",
            expected="the folder that fsdp2.record was given",
            fix='train with: with fsdp2.record("run", model, optimizer): ...',
        )
    return found
