"""Opens a file that a stranger may have named, without waiting for it.

To open a named pipe blocks until a process writes to it, and a device may have no end; both can be called ``model.safetensors``.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """``path`` as a file to be read. Raises: OSError, also if it is no regular file"""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path) -> int:
    """Open it as a descriptor, which the caller closes."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # not to wait for a pipe's writer
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "it is not a regular file", str(path))
    return file
