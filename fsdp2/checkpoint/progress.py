"""A progress bar on rank 0 of a terminal, for work that takes longer than a second."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

_PATIENCE_S = 1.0
"""Work shorter than this needs no bar."""


@contextlib.contextmanager
def progress_bar(what: str, nbytes: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes done since the last call.

    wanted: None shows the bar after a second if stderr is a terminal and ``rich`` is installed; True shows it at once
            and needs rich; other ranks never show it
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank != 0 or wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield lambda nbytes: None
        return
    try:
        import rich.console
        import rich.progress
    except ImportError:
        if wanted:
            raise
        yield lambda nbytes: None
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    progress = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True))
    task = progress.add_task(what, total=nbytes)
    shown_from = time.monotonic() + (0 if wanted else _PATIENCE_S)

    def advance(done: int) -> None:
        progress.advance(task, done)
        if time.monotonic() >= shown_from:
            progress.start()

    advance(0)
    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
