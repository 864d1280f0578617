"""Counts the work of a step: collectives by phase and kind, host time in our hooks, and the part of it that waits.

It hears what ``inspect/events.py`` tells.

Worked example: forward of ``layers.0`` begins at 0 ms, its all-gather of 1 MB over 2 ranks is waited for from 1 to 3 ms, and the hook
returns at 4 ms: forward has 1 all-gather of 1 MB, of which each rank sends 0.5 MB; 2 ms are exposed, and the hooks had 2 ms of
their own. From then on ``layers.0`` computes, by the host's clock, or by events on the device that the host never waits for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..inspect import Record
from ..planner.traffic import sent_by_each
from .computing import BETWEEN, Computing
from .memory_now import MemoryNow

DTYPE_NBYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


def nbytes_of(record: Record) -> int:
    """Bytes of the whole buffer, padding included; a tensor of another dtype travels as bytes."""
    return record.numel * DTYPE_NBYTES.get(record.dtype, 1)


@dataclass
class Tally:
    """One kind of collective in one phase. nbytes: of buffers; sent: by this rank, around a ring; exposed: seconds waited"""

    calls: int = 0
    nbytes: int = 0
    sent: int = 0
    exposed: float = 0.0


@dataclass
class Counts:
    """Since the last step. hooks: seconds in our hooks, waiting left out; computing: seconds by phase and unit, of the last step that
    the device has finished
    """

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    hooks: float = 0.0
    computing: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def exposed(self) -> float:
        return sum(each.exposed for each in self.tallies.values())


def _stamps(device: torch.device) -> Callable[[], Any]:
    """A function that returns an event after the work of the current stream; None while that is captured, to run later and often."""
    module = torch.get_device_module(device.type)
    is_capturing = getattr(module, "is_current_stream_capturing", bool)

    def stamp() -> Any:
        if is_capturing():
            return None
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(device))
        return event

    return stamp


class Meter(Computing[Any]):
    """``take`` returns the counts since the last call. memory: measured where much of it is in use"""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.memory = MemoryNow()
        self._thread = threading.get_ident()  # that trains; another one may save
        self._clock = clock
        self._stamp: Callable[[], Any] = clock
        self._on_host = True
        self._computing: list[tuple[tuple[str, str], Any, Any]] = []  # phase and unit, begin, end
        self._queued: deque[list[tuple[tuple[str, str], Any, Any]]] = deque()  # of steps that the device may not have finished
        self._counts = Counts()
        self._phase = BETWEEN
        self._hook_since: float | None = None
        self._waits_since: float | None = None
        self._waited = 0.0  # in this hook

    def time_on(self, device: torch.device) -> None:
        """Before the first event: units compute on ``device``."""
        self._on_host = device.type == "cpu"
        if not self._on_host:
            self._stamp = _stamps(device)

    def take(self) -> Counts:
        now = self._stamp()
        self._pause(now)
        self._resume(now)
        taken, self._counts = self._counts, Counts()
        self._queued.append(self._computing)
        self._computing = []
        done: list[tuple[tuple[str, str], Any, Any]] = []
        while self._queued and (self._on_host or (now is not None and all(end.query() for *_, end in self._queued[0]))):
            done = self._queued.popleft()
        for key, begin, end in done:
            seconds = end - begin if self._on_host else begin.elapsed_time(end) / 1e3
            taken.computing[key] = taken.computing.get(key, 0.0) + seconds
        return taken

    def _computed(self, phase: str, unit: str, begin: Any, end: Any) -> None:
        if end is not None:
            self._computing.append(((phase, unit), begin, end))

    def issued(self, record: Record, owner: object, num_ranks: int) -> None:
        tally = self._tally(record)
        nbytes = nbytes_of(record)
        tally.calls += 1
        tally.nbytes += nbytes
        tally.sent += sent_by_each("all_reduce" if record.kind.startswith("all-reduce") else record.kind, nbytes, num_ranks)
        self.memory.note(owner)

    def waits(self, record: Record) -> None:
        self.memory.look()
        if self._since is not None and threading.get_ident() == self._thread:  # outside of a hook
            self._pause(self._stamp())
        self._waits_since = self._clock()

    def done(self, record: Record) -> None:
        if self._waits_since is not None:
            waited = self._clock() - self._waits_since
            if self._hook_since is None and self._since is None and threading.get_ident() == self._thread:
                self._resume(self._stamp())
            self._waits_since = None
            self._tally(record).exposed += waited
            self._waited += waited

    def begins(self, phase: str, unit: str) -> None:
        self._phase = phase
        self._enter_hook()
        self._begin(phase, unit, self._stamp())

    def ends(self, phase: str, unit: str) -> None:
        self._enter_hook()
        self._end(phase, unit, self._stamp())

    def _enter_hook(self) -> None:
        self._hook_since, self._waited = self._clock(), 0.0

    def resumes(self) -> None:
        if self._hook_since is not None:
            self._counts.hooks += self._clock() - self._hook_since - self._waited
            self._hook_since = None
            self.memory.look()
            self._resume(self._stamp())

    def leaves(self) -> None:
        self.resumes()
        self._open.clear()
        self._phase = BETWEEN

    def _tally(self, record: Record) -> Tally:
        key = self._phase, record.kind
        tally = self._counts.tallies.get(key)
        if tally is None:
            tally = self._counts.tallies[key] = Tally()
        return tally
