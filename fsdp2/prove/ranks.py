"""Runs of N ranks on this machine, each forked from this process, so that torch is imported once.

    ended = run_ranks(4, lambda rank: train(), folder, limit=600, patience=60)
    ended.statuses                            # {0: 0, 1: 0, 2: 1, 3: None}: rank 3 was ended from outside

What ranks print goes to ``output-RANK`` in the folder. No run outlives its limit: ranks that have computed nothing for ``patience``
seconds, or that outlive the limit or a failed rank, get SIGTERM, and SIGKILL two seconds later.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

_LOOK_S = 0.05
_GRACE_S = 8.0
"""Seconds that the other ranks have after one has failed: most find broken connections, and say so."""
_IDLE_S = 0.05
"""Seconds for which a rank may compute in the whole of the patience, and still wait: its threads look now and then."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass
class Ended:
    """statuses: by rank; None: this process has ended it. stalled: no rank has computed anything for the patience"""

    statuses: dict[int, int | None]
    stalled: bool
    is_over: bool
    seconds: float

    @property
    def is_well(self) -> bool:
        return not any(status != 0 for status in self.statuses.values())


def run_ranks(num_ranks: int, body: Callable[[int], int], folder: Path, *, limit: float, patience: float) -> Ended:
    """Fork the ranks, run ``body(rank)`` in each, and wait for their ends."""
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    pids = {rank: _forked(rank, num_ranks, port, body, folder) for rank in range(num_ranks)}
    with _killed_at_the_end(pids):
        return _wait(pids, limit, patience)


def tail_of(folder: Path, rank: int, num_lines: int = 12) -> list[str]:
    """The last lines that a rank has printed."""
    path = folder / f"output-{rank}"
    return path.read_text(errors="replace").splitlines()[-num_lines:] if path.exists() else []


def _forked(rank: int, num_ranks: int, port: int, body: Callable[[int], int], folder: Path) -> int:
    pid = os.fork()
    if not pid:
        _run(rank, num_ranks, port, body, folder)
    return pid


def _run(rank: int, num_ranks: int, port: int, body: Callable[[int], int], folder: Path) -> NoReturn:
    status = 1
    try:
        os.setsid()
        for signal_of_parent in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_of_parent, signal.default_int_handler if signal_of_parent == signal.SIGINT else signal.SIG_DFL)
        output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(_environment(rank, num_ranks, port))
        torch.set_num_threads(1)
        random.seed(rank)  # forked ranks would draw the same, as ranks that torchrun starts do not
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(rank)
        status = body(rank)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """As torchrun gives it; devices are hidden."""
    here, ranks = str(rank), str(num_ranks)
    own = {"RANK": here, "LOCAL_RANK": here, "ROLE_RANK": here, "GROUP_RANK": "0"}
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "prove"}
    return {**own, **sizes, **meeting, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(pids: dict[int, int], limit: float, patience: float) -> Ended:
    begun = time.monotonic()
    statuses: dict[int, int | None] = {}
    until, moved_at, computed = begun + limit, begun, 0.0
    stalled = is_over = False
    asked: set[int] = set()  # ranks that this process has told to end
    while len(statuses) < len(pids):
        time.sleep(_LOOK_S)
        now = time.monotonic()
        running = {rank: pid for rank, pid in pids.items() if rank not in statuses}
        for rank, pid in running.items():
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(code)
                statuses[rank] = None if rank in asked else status
                if status and not asked:
                    until = min(until, now + _GRACE_S)
        total = sum(map(_cpu_seconds, running.values()))
        if abs(total - computed) > _IDLE_S * len(pids):
            moved_at, computed = now, total
        stalled = stalled or (not asked and now - moved_at > patience)
        if (stalled or now > until) and running.keys() - asked:
            is_over = now > begun + limit
            asked |= running.keys()
            _tell(running, signal.SIGTERM)
            until = now + 2.0
        elif now > until:
            _tell(running, signal.SIGKILL)
            until = now + 60.0
    return Ended(statuses, stalled, is_over, time.monotonic() - begun)


def _cpu_seconds(pid: int) -> float:
    """What a process has computed for, its ended children included; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def _tell(pids: dict[int, int], what: signal.Signals) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, what)  # with what it has started


@contextlib.contextmanager
def _killed_at_the_end(pids: dict[int, int]) -> Iterator[None]:
    try:
        yield
    finally:  # ctrl-C as well
        _tell(pids, signal.SIGKILL)
        for pid in pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
