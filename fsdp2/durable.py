"""Files and folders that survive a power failure: their bytes and names are on disk when these functions return.

Files are always new: an existing one is removed first, because writing through a link would overwrite its target.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, in place of any earlier one; on disk when the block ends."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replaced_file(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """A new file to write as ``partial``, renamed to ``path`` when the block ends; removed after an error."""
    try:
        with durable_file(partial) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the files created, renamed and removed in ``folder`` are so on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
