"""A progress bar on rank 0, if somebody is there to see it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch.distributed as dist


@contextlib.contextmanager
def progress_bar(what: str, nbytes: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """A function to call with every number of bytes that are done.

    wanted: None shows it where the error output is a terminal and ``rich`` is installed; True needs rich; other ranks never show it
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
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as progress:
        task = progress.add_task(what, total=nbytes)
        yield lambda nbytes: progress.advance(task, nbytes)
