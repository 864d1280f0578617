"""Start a user's script as ``__main__``. ``fsdp2 run`` starts one with fsdp2 in place of torch's FSDP2.

    torchrun --nproc-per-node 8 -m fsdp2 run train.py --config llama.toml
    torchrun --nproc-per-node 8 -m fsdp2 run -m torchtitan.train --config llama.toml
    fsdp2 run --fsdp1 old_script.py         # FSDP1's names as well

The program sees its own ``sys.argv`` and ``__main__``, as if Python had been given it. ``python -m fsdp2.run`` is ``fsdp2 run``.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import runpy
import sys
import traceback
from collections.abc import Sequence

from .arguments import COUNT, POSITIVE, word_of
from .errors import ArgumentError, FSDPError
from .hints.mixed_tensors import explain_mixed_tensors
from .installation import install


def add_script(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a script and its own arguments."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def checked_script(command: str, options: argparse.Namespace) -> list[str]:
    """The script's own arguments. Raises: ArgumentError if there is no such script"""
    if not _is_there(options.script, options.is_module):
        raise ArgumentError(
            f"{command} found no {options.script!r}",
            expected="a Python file, or -m and a module",
            fix=f"for instance: fsdp2 {command} train.py",
        )
    return list(options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments)


def _is_there(script: str, is_module: bool) -> bool:
    if is_module:  # the package around it: a search for the module itself would run the package's code here
        return importlib.machinery.PathFinder.find_spec(script.split(".")[0], [os.getcwd(), *sys.path]) is not None
    return os.path.isfile(script)


def add_cpu_run(parser: argparse.ArgumentParser, *, ranks: int, steps: int, timeout: float) -> None:
    """The arguments of a command that runs a script's first steps on ranks of this machine, with their defaults."""
    seconds = word_of(POSITIVE, float)
    for name, kind, default, said in (
        ("--ranks", word_of(COUNT), ranks, "processes on this machine"),
        ("--steps", word_of(COUNT), steps, "optimizer steps, after which the script is ended"),
        ("--timeout", seconds, timeout, "seconds in which no rank moves, after which the ranks are ended"),
        ("--limit", seconds, 600.0, "seconds that a run of the script may take"),
    ):
        metavar = "N" if isinstance(default, int) else "S"
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{said} (default: {default:g})")


def run_script(script: str, arguments: Sequence[str], is_module: bool = False) -> None:
    """Run a file, or a module, as ``__main__`` of this process."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(script)))
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except RuntimeError as error:
        explain_mixed_tensors(error)
        raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fsdp1", action="store_true", help="FSDP1's names as well, by fsdp2.compat")
    add_script(parser)


def run(options: argparse.Namespace) -> int:
    """Install, say so once on rank 0, and run the script."""
    checked_script("run", options)
    installation = install(fsdp1=options.fsdp1)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{installation!r}\n")
    try:
        run_script(options.script, options.arguments, options.is_module)
    except FSDPError:  # the script's own, with the lines that led to it
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fsdp2.run", description="Run a program on fsdp2 instead of torch's FSDP2.")
    add_arguments(parser)
    try:
        sys.exit(run(parser.parse_args()))
    except ArgumentError as error:
        parser.error(str(error))
