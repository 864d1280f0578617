"""A thread that looks on alongside the training, and is over before the interpreter is; how such a thread tells, and ends its process.

    thread = BackgroundThread(look_until_told, stop=told.set, name="fsdp2_lookout")
    ...
    thread.end()    # or the end of the program does it

Where Python ends while a daemon thread is inside of torch's C++ (it asks the store, say), Python unwinds that thread by force, C++ does
not allow it, and the process of a training that went well aborts with SIGABRT. So the end of the program first tells the thread to
stop, and waits for it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from ..printable import printable

EXIT_STATUS = 75
"""Exit status of a process that has waited too long for other ranks; "try again later" in sysexits.h."""

PATIENCE_AT_EXIT = 10.0
"""Seconds for which the end of a program waits: a store whose host has been cut off may hold the thread for minutes."""


_running: set[BackgroundThread] = set()


class BackgroundThread:
    """Runs ``work`` from the construction on. stop: makes ``work`` return soon; any thread may call it, more than once

    at_exit: ends the thread at the end of the program; None: ``end`` does
    """

    def __init__(
        self, work: Callable[[], None], *, stop: Callable[[], object], name: str, at_exit: Callable[[], None] | None = None
    ) -> None:
        self._work, self._stop, self.at_exit = work, stop, at_exit or (lambda: self.end(PATIENCE_AT_EXIT))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _running.add(self)
        self._thread.start()

    def end(self, timeout: float | None = None) -> None:
        """Stop the thread, and wait for it for so many seconds; None: until it is over."""
        self._stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            _running.discard(self)


@atexit.register
def _end_all() -> None:
    for each in tuple(_running):
        each.at_exit()


def tell(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def end_process() -> None:
    """The main thread waits in a collective, where no exception reaches it."""
    sys.stdout.flush()
    os._exit(EXIT_STATUS)
