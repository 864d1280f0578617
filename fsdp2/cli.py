"""The command line, ``fsdp2 COMMAND`` or ``python -m fsdp2 COMMAND``: one module per command, imported when it is asked for.

A command's module has ``add_arguments(parser)`` and ``run(options) -> int``, which returns the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Collection

from .errors import ArgumentError, FSDPError

COMMANDS = {
    "run": ("fsdp2.run", "run a program on fsdp2 instead of torch's FSDP2"),
    "convert": ("fsdp2.checkpoint.conversion.convert", "turn a checkpoint of one format into another"),
    "verify": ("fsdp2.checkpoint.conversion.verify", "compare a checkpoint's bytes with the digests that were written with them"),
    "plan": ("fsdp2.planner.command", "plan a training run: memory, its peak, communication, step time"),
    "search": ("fsdp2.planner.search_command", "propose settings that fit the GPU's memory, the fastest first"),
    "measure": ("fsdp2.planner.measure", "measure this machine and write a card file, for plans and searches"),
    "diff": ("fsdp2.inspector.diff_command", "say where two recorded runs first differ, and whether by rounding"),
    "report": ("fsdp2.inspector.report.command", "show what a run has written down as an HTML page"),
    "doctor": ("fsdp2.doctor.command", "run a script's first steps on CPU ranks and report its faults"),
    "prove": ("fsdp2.prove.command", "run a script on CPU ranks and say whether it trains what it means to"),
    "explain": ("fsdp2.explain", "show what the troubleshooting page says of an error or a symptom"),
    "migrate": ("fsdp2.migrate.command", "rewrite scripts written for FSDP1, DDP, DeepSpeed or torch's FSDP2"),
}

NEVER_QUIET = ("run", "explain")  # what they print is the user's program's, or all that they do


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; why it is not 0 is on standard error, or is what the command prints.

    0  done
    1  not done, or the command's answer is no: runs that differ, a script with findings under ``--strict``
    2  nothing was tried: wrong arguments, a file that is not there, an extra that is not installed
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_for(arguments[:1])
    options = parser.parse_args(arguments)
    dashes = arguments.index("--") if "--" in arguments else 0
    if getattr(options, "script", None) in arguments[1:dashes]:  # options of the command may stand between the script and the dashes
        own = parser.parse_args(arguments[:dashes]).arguments
        script = dashes - len(own) - 1
        options = parser.parse_args([arguments[0], *own, *arguments[1 : script + 1], *arguments[dashes:]])
    if not dashes and hasattr(options, "ranks"):
        known = {"--json", *(f"--{name}" for name in vars(options))}
        for word in (word for word in getattr(options, "arguments", ()) if word.partition("=")[0] in known):
            sys.stderr.write(f"fsdp2 {options.command}: {word} goes to the script; an option of the command comes before the script\n")
    try:
        with contextlib.ExitStack() as undo:
            if getattr(options, "quiet", False):
                undo.enter_context(contextlib.redirect_stdout(undo.enter_context(open(os.devnull, "w"))))
            return int(importlib.import_module(COMMANDS[options.command][0]).run(options))
    except FSDPError as error:
        sys.stderr.write(f"fsdp2 {options.command}: {error}\n")
        return 2 if isinstance(error, ArgumentError) else 1


def parser_for(commands: Collection[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of these commands: importing a command may need its extra, and takes time."""
    parser = argparse.ArgumentParser(prog="fsdp2", description="Tools for sharded data parallel training.")
    parser.add_argument("--version", action=_Version, nargs=0, help="versions of fsdp2 and torch")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in commands:
            importlib.import_module(module).add_arguments(subparser)
        if name not in NEVER_QUIET:
            subparser.add_argument("--quiet", action="store_true", help="print errors alone; the exit status is the result")
    return parser


class _Version(argparse.Action):
    """Prints what a report of a fault should say."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"fsdp2 {importlib.metadata.version('fsdp2')}, torch {importlib.metadata.version('torch')}\n")
        parser.exit()
