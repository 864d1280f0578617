"""Which ranks are gone, for the error of a failed collective: the backend names an address at most, and no rank.

At its first ``fully_shard`` each rank writes its process into the store of the default process group, under its host.
That is all that a program without errors sends. When a collective fails, each rank looks which processes of its own
host have ended or are stopped, and tells what it finds through the store, for ranks on other hosts. A rank that an
exception ends tells the exception.

Worked example: rank 1 of 4 gets SIGKILL while the others wait for it in a reduce-scatter.

    rank 0      gloo: Connection reset by peer; /proc says that rank 1's process has ended; tells the store; raises
    rank 2      on another host: reads it there, and raises the same LostRankError
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import socket
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .errors import FSDPError, LostRankError
from .torch_names import torch_collectives

PATIENCE = 1.0
"""Seconds for which a rank whose collective has failed looks for one that is gone: its process may still be ending."""


def raise_lost(error: Exception, what: str, problem: FSDPError | None = None) -> NoReturn:
    """Raise the LostRankError that ``error`` of a collective means; errors of another kind as they are. Collective: no.

    what:    the collective: "the all-gather of layers.3"
    problem: this rank's own, which the error reports as well
    """
    if is_of_memory(error) or isinstance(error, (FSDPError, torch.AcceleratorError)):
        raise error
    lost = {} if _roll is None else _roll.look()
    items = [f"rank {rank}: {why}" for rank, why in lost.items()]
    if _roll is not None and not items:
        items = [f"rank {rank}: it has not come to its first fully_shard" for rank in _roll.absent()] or [
            ("no process of this host has ended or is stopped: look at the other hosts, or a rank has not come (docs/hangs.md)")
        ]
    told = (str(error).strip().splitlines() or [""])[0]
    items += [f"this rank has a problem of its own: {problem}"] if problem is not None else []
    raise LostRankError(
        f"a rank is gone, or cannot be reached: {what} has failed",
        items=[*items, f"the backend said: {type(error).__name__}: {told}"],
        expected="every rank to take part until all are done",
        fix="look at that rank's own error, and start again from the latest checkpoint, which is unchanged",
    ) from error


def is_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that this rank has no memory left: of torch's allocators, libraries, or the system."""
    said = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError | OSError)
        and any(text in said for text in ("an't allocate memory", "annot allocate memory", "out of memory", "ALLOC_FAILED"))
    )


def lost_ranks() -> dict[int, str]:
    """Why ranks are gone, as the store and this host know it, for another thread: it makes a connection of its own."""
    if _roll is None:
        return {}
    roll = copy.copy(_roll)
    roll.store = torch_collectives.own_connection_to_the_store(_prefix())
    return roll.known()


def number_of_world() -> int:
    """How many default process groups this program has had, equal on all ranks. Each has its own keys in the store."""
    return _num_made


def note_process() -> None:
    """Write this rank's process into the store, once for each default process group. Collective: no."""
    global _roll, _num_made
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1 or (_roll is not None and _roll.world() is world):
        return
    if _num_made == 0:
        atexit.register(_tell_exception)
    _num_made += 1
    with contextlib.suppress(RuntimeError):  # a store that keeps nothing, as torch's fake backend has
        _roll = _Roll(torch_collectives.keys_of_the_store(_prefix()), world)


def _prefix() -> str:
    return f"fsdp2_processes_{_num_made}"


class _Roll:
    """What one rank knows of the others' processes. Keys of the store, each list with the number of its entries:

    HOST, HOST/1, ...   rank, process and its start, of the ranks on a host
    told, told/1, ...   rank, and why it is gone; nothing after the rank: it has lost another rank itself
    """

    def __init__(self, store: Any, world: dist.ProcessGroup) -> None:
        self.world = weakref.ref(world)  # destroy_process_group ends a group's threads if nobody else refers to it
        self.store = store
        self._rank = dist.get_rank()
        self._host = _host()
        self._append(self._host, f"{self._rank} {os.getpid()} {_stat(os.getpid())[1]}")

    def look(self) -> dict[int, str]:
        """Why ranks are gone, in order; empty if that does not show within ``PATIENCE``. Tells the other ranks."""
        try:
            deadline = time.monotonic() + PATIENCE
            while not (lost := self.known()) and time.monotonic() < deadline:
                time.sleep(0.05)
            for rank, why in lost.items():
                self.tell(rank, why)
            self.tell(self._rank, "")
        except RuntimeError:
            return {0: "the store of the ranks is gone with the process that had it, which most often is this rank's"}
        return lost

    def known(self) -> dict[int, str]:
        here: dict[int, str] = {}
        for entry in self._entries(self._host):
            number, pid, start = entry.split()
            state, started = _stat(int(pid))
            if started != start or state in "ZX":
                here[int(number)] = f"its process ({pid} on {socket.gethostname()}) has ended"
            elif state in "Tt":
                here[int(number)] = f"its process ({pid} on {socket.gethostname()}) is stopped"
        # Read after the processes: what a rank tells before it ends counts more than that it has ended.
        told: dict[int, str] = {}
        for number, why in (entry.split(" ", 1) for entry in self._entries("told")):
            told.setdefault(int(number), why)
        for rank in here.keys() - told.keys():
            told[rank] = here[rank]
        return {rank: why for rank, why in told.items() if why and rank != self._rank}

    def absent(self) -> list[int]:
        """Ranks that torchrun has started on this host, and that have not written their processes."""
        present = {int(entry.split()[0]) for entry in self._entries(self._host)}
        first = self._rank - int(os.environ.get("LOCAL_RANK", 0))
        return [rank for rank in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 0))) if rank not in present]

    def tell(self, rank: int, why: str) -> None:
        self._append("told", f"{rank} {why}")

    def _append(self, name: str, entry: str) -> None:
        self.store.set(f"{name}/{self.store.add(name, 1)}", entry)

    def _entries(self, name: str) -> list[str]:
        keys = [f"{name}/{number}" for number in range(1, self.store.add(name, 0) + 1)]
        return [bytes(self.store.get(key)).decode() for key in keys if self.store.check([key])]


_roll: _Roll | None = None
_num_made = 0


def _tell_exception() -> None:
    """At the end of the program: which exception has ended it, if one has."""
    error = getattr(sys, "last_value", None)
    if (
        error is None
        or isinstance(error, LostRankError)
        or _roll is None
        or not dist.is_initialized()
        or dist.group.WORLD is not _roll.world()
    ):
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[0].filename}, line {frames[0].lineno})" if frames else ""
    said = " ".join(str(error).split())[:600]
    with contextlib.suppress(RuntimeError):
        _roll.tell(dist.get_rank(), f"its program has ended with {type(error).__name__}: {said}{where}")


def _host() -> str:
    """A name for the processes that this process can see: of one boot of a host, in one container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return ";".join(parts).replace("/", "|")


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, a letter as in ps, and when it was started; "X" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return "X", ""
        try:  # a system without /proc
            os.kill(pid, 0)
        except ProcessLookupError:
            return "X", ""
        return "R", "?"
    return fields[0], fields[19]
