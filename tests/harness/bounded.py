"""Run an action in a forked process, and say how it ended, how long it took and how much memory, whatever it does there.

What hangs, is killed or takes too much ends the fork alone.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2.errors import FSDPError

ADDRESS_SPACE_NBYTES = 4 << 30
"""What a fork may map beyond what it begins with: so much that only what would endanger the machine fails there."""


@dataclass(frozen=True)
class Outcome:
    """value: what the action returned; error: text of the FSDPError that it raised; crash: what else ended it. One of the three.

    seconds: of the processor; growth: bytes of the highest resident set over what was resident before (Linux; elsewhere 0)
    """

    value: Any
    error: str | None
    crash: str | None
    seconds: float
    growth: int


def bounded(action: Callable[[], Any], seconds: float = 60.0) -> Outcome:
    """``action()``, whose result must be picklable, in a fork that has ``seconds`` of the clock."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that forking with threads is dangerous: the action runs in this one alone
        child = os.fork()
    if child == 0:
        os.close(reading)
        _run(action, seconds, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome(None, None, f"hangs for {seconds} s" if name == "SIGALRM" else f"killed by {name}", seconds, 0)
    return pickle.loads(told)  # type: ignore[no-any-return]


def _run(action: Callable[[], Any], seconds: float, writing: int) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        torch.set_num_threads(1)
        linux = sys.platform == "linux"
        if linux:
            Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
            limit = _status("VmSize") + ADDRESS_SPACE_NBYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = _status("VmRSS") if linux else 0
        begin = time.process_time()
        value, error, crash = None, None, None
        try:
            value = action()
        except FSDPError as raised:
            error = str(raised)
        except BaseException:
            crash = traceback.format_exc(limit=-6)
        spent = time.process_time() - begin
        growth = _status("VmHWM") - before if linux else 0
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(Outcome(value, error, crash, spent, growth)))
    finally:
        os._exit(0)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) * 1024


__all__ = ["Outcome", "bounded"]
