"""Which collectives this rank has issued, waits for, and has completed: a ring of records, kept only while it has a reader.

With a log, each collective costs two appends. Records hold what other ranks' records can be compared by: the number among
the collectives of one process group, and what was sent. A ``Listener`` is called at once, also when units begin and end.

Worked example, one group of a rank that waits in backward:

    log.issued(group, "all-gather", "layers.7", 4096, torch.float32, process_group)   Record(number=213, ..., stage=ISSUED)
    log.waits(group)                                                                  the same record, stage=WAITING
    log.done(group)                                                                   the same record, stage=DONE
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from ..core.comm import collective_log
from ..core.comm.streams import Stream, Streams
from ..torch_names import torch_autograd
from . import torch_fsdp2

LENGTH = 1024
"""How many records are kept: a few steps of a large model."""


class Stage(str, Enum):
    """How far a collective has come, as the host sees it. QUEUED: on a device's stream, whose event tells how far."""

    ISSUED = "issued"
    WAITING = "waiting"
    QUEUED = "queued"
    DONE = "done"


@dataclass(slots=True)
class Record:
    """One collective of a rank, as other ranks can compare it with theirs, and how far it has come.

    number: among those of its process group since the log was switched on, from 1; equal on all its ranks
    group:  name of the process group, equal on all its ranks
    kind:   "all-gather", "reduce-scatter", "all-reduce", or another name for its purpose
    unit:   name of the unit; "" if it belongs to no unit
    numel:  of the whole buffer, padding included
    passed: on a device, whether its stream has passed it
    """

    number: int
    group: str
    kind: str
    unit: str
    phase: str
    step: int
    numel: int
    dtype: str
    stage: Stage = Stage.ISSUED
    passed: Callable[[], bool] | None = None

    @property
    def sent(self) -> tuple[str, str, str, int, str]:
        """The fields that must be equal on all ranks."""
        return self.kind, self.unit, self.phase, self.numel, self.dtype

    @property
    def is_waited_for(self) -> bool:
        """The host, or a device, waits for it."""
        return self.stage in (Stage.WAITING, Stage.QUEUED)

    def has_ended(self) -> bool:
        if self.stage is Stage.QUEUED and self.passed is not None and self.passed():
            self.stage, self.passed = Stage.DONE, None
        return self.stage is Stage.DONE


class Listener:
    """Called at each moment when it comes, in the thread in which it comes. These methods do nothing; override them."""

    def issued(self, record: Record, owner: object, num_ranks: int) -> None:
        """``owner`` is about to issue a collective over so many ranks."""

    def waits(self, record: Record) -> None:
        """The host is about to wait for ``record``."""

    def done(self, record: Record) -> None:
        """The host goes on after ``record``: it is complete or, on a device, ordered."""

    def begins(self, phase: str, unit: str) -> None:
        """A hook of ours is called: ``phase`` of ``unit`` begins."""

    def ends(self, phase: str, unit: str) -> None:
        """A hook of ours is called: ``phase`` of ``unit`` has ended; "" stands for all units."""

    def resumes(self) -> None:
        """The hook returns."""

    def leaves(self) -> None:
        """The forward, or the backward, of a root has ended."""


listeners: tuple[Listener, ...] = ()
"""The listeners that are called."""


class CollectiveLog:
    """The records of one rank. Any thread may append; a reader on another thread gets copies.

    moves:  counts what happens, so that a reader sees whether anything happens
    place:  where the main thread is: ("forward", "layers.3"); ("", ""): neither in forward nor in backward
    entered: the places entered since this forward, or backward, has begun
    failed: the innermost place that an exception has ended; ("", "") once the main thread enters another
    at_disk: threads that write or read files: they may take long, and meanwhile nothing else of this rank moves
    ranks:  of each process group, by its name
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self.records: deque[Record] = deque(maxlen=LENGTH)
        self.moves = 0
        self.place = self.failed = ("", "")
        self.entered: deque[tuple[str, str]] = deque(maxlen=LENGTH)
        self.at_disk: set[int] = set()
        self.ranks: dict[str, tuple[int, ...]] = {}
        self._step = step
        self._numbers: dict[str, int] = {}
        self._open: dict[tuple[int, str], Record] = {}

    def issued(
        self, owner: object, kind: str, unit: str, numel: int, dtype: torch.dtype | None, process_group: dist.ProcessGroup
    ) -> None:
        """``owner`` is about to issue a collective; an owner has at most one of each kind under way."""
        group = process_group.group_name
        if group not in self.ranks:
            self.ranks[group] = tuple(dist.get_process_group_ranks(process_group))
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        phase = "backward" if torch_autograd.current_graph_task() != -1 else self.place[0] or "forward"
        record = Record(number, group, kind, unit, phase, self._step(), numel, str(dtype).removeprefix("torch."))
        self._open[id(owner), kind] = record
        self.records.append(record)
        self.moves += 1
        for listener in listeners:
            listener.issued(record, owner, len(self.ranks[group]))

    def waits(self, owner: object, kind: str) -> None:
        """The host is about to wait for the collective."""
        record = self._open.get((id(owner), kind))
        if record is not None:
            record.stage = Stage.WAITING
            self.moves += 1
            for listener in listeners:
                listener.waits(record)

    def done(self, owner: object, kind: str, streams: Streams | None = None, stream: Stream = None) -> None:
        """The collective is complete for the host; on a device, once the work that ``stream`` has been given so far has run."""
        record = self._open.pop((id(owner), kind), None)
        if record is None:
            return
        self.moves += 1
        for listener in listeners:
            listener.done(record)
        if streams is None or streams.host_waits or streams.is_capturing():
            record.stage = Stage.DONE
            return
        record.passed = functools.partial(streams.has_passed, streams.mark(stream))
        record.stage = Stage.QUEUED

    def enter(self, phase: str, unit: str) -> None:
        """The main thread begins with ``phase`` of ``unit``."""
        self.place, self.failed = (phase, unit), ("", "")
        self.entered.append(self.place)
        self.moves += 1
        for listener in listeners:
            listener.begins(phase, unit)

    def exit(self, phase: str, unit: str) -> None:
        """A hook after ``phase`` of ``unit`` begins; "" stands for all units."""
        for listener in listeners:
            listener.ends(phase, unit)

    def resume(self) -> None:
        """The hook that called ``enter`` or ``exit`` returns."""
        for listener in listeners:
            listener.resumes()

    def fail(self, phase: str, unit: str) -> None:
        """An exception has ended ``phase`` of ``unit``. The phase around it calls this as well when the exception reaches it."""
        if self.failed == ("", ""):
            self.failed = (phase, unit)

    def leave(self) -> None:
        """The forward, or the backward, of the root has ended."""
        self.place = ("", "")
        self.entered.clear()
        self.moves += 1
        for listener in listeners:
            listener.leaves()


_watched: tuple[CollectiveLog, ...] = ()  # those of ``switched_on``: the last comes first, because it numbers collectives from there
_heard: CollectiveLog | None = None  # that of listeners, which need no numbers


def _current() -> CollectiveLog | None:
    return _watched[-1] if _watched else _heard


def _switch() -> None:
    """Readers have come, or gone."""
    collective_log.current = _current()
    if collective_log.current is None:
        torch_fsdp2.ignore()
    else:
        torch_fsdp2.hear()


@contextlib.contextmanager
def switched_on(step: Callable[[], int]) -> Iterator[CollectiveLog]:
    """Record collectives inside. step: returns the number of the step that runs"""
    global _watched
    log = CollectiveLog(step)
    _watched = (*_watched, log)
    _switch()
    try:
        yield log
    finally:
        _watched = tuple(each for each in _watched if each is not log)  # blocks may end in any order
        _switch()


def listen(listener: Listener, step: Callable[[], int]) -> None:
    """Call ``listener`` from now on until ``ignore``; a log exists as long as there is a listener."""
    global listeners, _heard
    listeners = (*listeners, listener)
    _heard = _heard or CollectiveLog(step)
    _switch()


def ignore(listener: Listener) -> None:
    """Undo one ``listen``."""
    global listeners, _heard
    at = [each is listener for each in listeners].index(True)
    listeners = (*listeners[:at], *listeners[at + 1 :])
    _heard = _heard if listeners else None
    _switch()


@contextlib.contextmanager
def at_disk() -> Iterator[None]:
    """Around code that writes or reads files. A thread must not nest it."""
    log = _current()
    if log is None:
        yield
        return
    log.at_disk.add(threading.get_ident())
    try:
        yield
    finally:
        log.at_disk.discard(threading.get_ident())
