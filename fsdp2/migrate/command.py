"""``fsdp2 migrate PATH...``: the files it reads, shows and writes, and its exit status.

$ fsdp2 migrate train.py
--- train.py
+++ train.py (fsdp2)
...
train.py:31: changed: device_id=rank dropped: parallelize moves the model to the device of its mesh.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from pathlib import Path

from ..arguments import COUNT, POSITIVE, word_of
from ..errors import ArgumentError
from ..printable import printable, say
from .files import CONFIGS, migrate_files
from .report import Migrated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 migrate``."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="Python files, accelerate YAML files, or folders of them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--diff", action="store_true", help="show what would change (the default)")
    what.add_argument("--write", action="store_true", help="change the files")
    what.add_argument("--parity", type=Path, metavar="SCRIPT", help="run SCRIPT and its rewritten copy side by side, on CPU processes")
    parser.add_argument("--steps", type=word_of(COUNT), default=5, help="with --parity: optimizer steps to compare (default: 5)")
    parser.add_argument("--ranks", type=word_of(COUNT), default=2, help="with --parity: processes of each run (default: 2)")
    parser.add_argument(
        "--tolerance",
        type=word_of(POSITIVE, float),
        help="with --parity: largest relative difference that counts as equal (default: 1e-4; 2e-2 in bf16 and fp16)",
    )
    parser.add_argument("--in-place", action="store_true", help="with --parity: run in the current folder, not in copies of it")
    parser.add_argument(
        "--timeout", type=word_of(POSITIVE, float), default=600, help="with --parity: time limit of each run in seconds (default: 600)"
    )


def run(options: argparse.Namespace) -> int:
    """0: everything is rewritten, or the runs are the same. 1: something is left to do, or they differ; both are listed."""
    _require_extra()
    if options.parity is not None:
        from .parity import compare

        return compare(
            options.parity, options.paths, options.steps, options.ranks, options.tolerance, options.timeout, options.in_place
        )
    if not options.paths:
        raise ArgumentError("fsdp2 migrate got no PATH", expected="files or folders", fix="for instance: fsdp2 migrate train.py")
    links_out: list[Path] = []
    files = list(_files(map(Path, options.paths), links_out))
    if not files:
        raise ArgumentError(
            f"there is nothing to migrate in {', '.join(options.paths)}",
            expected=f"a file that exists, or a folder with files that end in .py, {', '.join(CONFIGS)}",
            fix="check the path",
        )
    for path in links_out:
        say(f"{path}: left: the link leads out of the folder; name its target to migrate it")
    complete = not links_out
    for path, result in migrate_files(files).items():
        complete &= result.is_complete
        if options.write:
            if result.new != result.old:
                path.write_bytes(result.new.encode())  # as they are: text mode would change line ends
        else:
            diff = "".join(_diff(path, result))
            sys.stdout.write(printable(diff) if sys.stdout.isatty() else diff)
        for finding in result.findings:
            say(finding.shown(path))
    return 0 if complete else 1


def _files(paths: Iterable[Path], links_out: list[Path]) -> Iterable[Path]:
    """links_out: receives links that lead out of their folder. Nobody named their targets, so these are left."""
    for path in paths:
        if path.is_dir():
            for each in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
                if hidden or not each.is_file() or each.suffix not in (".py", *CONFIGS):
                    continue
                if not each.is_symlink():
                    yield each
                elif path.resolve() not in each.resolve().parents:  # any other leads to a file that has its turn
                    links_out.append(each)
        elif path.is_file() and path.suffix != ".ipynb":
            yield path
        else:
            notebook = path.suffix == ".ipynb"
            raise ArgumentError(
                f"{path} is a notebook" if notebook else f"there is no file or folder {path}",
                expected=f"a file or a folder that exists; .py and {', '.join(CONFIGS)}, not notebooks",
                fix="save its code as a .py file first" if notebook else "check the path",
            )


def _diff(path: Path, result: Migrated) -> Iterable[str]:
    old, new = result.old.splitlines(keepends=True), result.new.splitlines(keepends=True)
    for line in difflib.unified_diff(old, new, str(path), f"{path} (fsdp2)"):
        yield line if line.endswith("\n") else f"{line}\n"


def _require_extra() -> None:
    missing = []
    for name in ("libcst", "ruamel.yaml"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ArgumentError(f"fsdp2 migrate needs {' and '.join(missing)}", expected="the extra cli", fix='pip install "fsdp2[cli]"')
