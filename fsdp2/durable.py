"""Files and folders that survive a power failure: their bytes and names are on the disk when these functions return.

A file is always a new one. What has its name goes first, because it may be a link: to write through it would overwrite the file that it
leads to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to be written, on the disk at the end; in place of what may be there."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replaced_file(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """A new file to be written as ``partial``, which becomes ``path`` at once at the end; after an error it is gone."""
    try:
        with durable_file(partial) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until files made, renamed and removed in ``folder`` are so on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
