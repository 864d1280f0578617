"""``verify``: whether a checkpoint's bytes are those that were written; ``fsdp2 verify PATH``. ``digests.py`` compares."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ...arguments import COUNT, EXISTING, Kind, add_format, checked_path, require, word_of
from ...printable import say, say_json
from ..dcp_read import METADATA
from ..digests import Verified, compared, dcp_parts, safetensors_parts, torch_parts
from ..failures import failure
from .open_source import family_meant
from .source import FORMATS, check_format, dcp_folders, detect, families, find_deepspeed

_SHARE = Kind(
    lambda share: isinstance(share, tuple) and len(share) == 2 and COUNT.holds(share[1]) and share[0] in range(share[1]),
    "a tuple (index, count)",
    "(0, 1)",
)


def verify(path: str | os.PathLike[str], *, format: str | None = None, share: tuple[int, int] = (0, 1)) -> Verified:
    """Read a checkpoint and compare it with its digests; in a ``Checkpointer``'s folder, all checkpoints.

    path, format: as for ``open_source``
    share:        (index, count) compares only every ``count``-th part, from ``index`` on: ranks share the work

    Collective: no
    Memory:     16 MiB, and the descriptions of the files
    Raises:     CheckpointError naming files and keys that are damaged, missing or cut short

    Example:
        fsdp2.checkpoint.save_safetensors(model, folder)
        fsdp2.checkpoint.verify(folder).unchecked  # ()
    """
    check_format(format)
    root = checked_path("verify", "path", path)
    require("verify", _SHARE, share=share)
    kind = format or detect(root)
    if kind == "safetensors":
        parts = safetensors_parts(root)
    elif kind == "dcp":
        parts = dcp_parts([root] if (root / METADATA).is_file() else dcp_folders(root))
    else:
        parts = torch_parts(_torch_files(root, kind))
    return compared(root, kind, parts, share)


def _torch_files(path: Path, kind: str) -> list[Path]:
    """The files that ``open_source`` reads."""
    if kind == "deepspeed":
        folder = find_deepspeed(path) or path
        found = sorted(folder.glob("*_states.pt"))
        if not found:
            expected = "what the file 'latest' names, or *_states.pt of DeepSpeed"
            raise failure(f"{folder} has no checkpoint", expected=expected, file=folder)
        return found
    together = families(path) if path.is_dir() else [family_meant(path)]
    return [file for family in together for file in family]


# --- the command ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 verify``."""
    parser.add_argument("path", type=word_of(EXISTING, str), help="folder or file")
    parser.add_argument("--from", dest="source_format", choices=FORMATS, help="the format of PATH, if its files suggest another")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    """Compare, and print the result."""
    done = verify(options.path, format=options.source_format)
    if options.format == "json":
        say_json(done)
        return 0
    say(f"{done.path}: {done.nbytes / 1e6:.1f} MB of {done.format} are as they were written")
    for each in done.unchecked[:20]:
        say(f"  no digest: {each}")
    if len(done.unchecked) > 20:
        say(f"  no digest: {len(done.unchecked) - 20} more")
    return 0
