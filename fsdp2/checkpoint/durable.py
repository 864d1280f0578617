"""Files and folders that survive a power failure: their bytes and names are on the disk when these functions return."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to be written, on the disk at the end; in place of what may be there."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until files made, renamed and removed in ``folder`` are so on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
