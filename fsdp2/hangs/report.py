"""The report of one rank: its last collectives, where its main thread is, and its Python stacks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from types import FrameType

import torch

from ..inspect import CollectiveLog, Record, Stage
from ..torch_names import torch_tensors
from . import joint_calls

LAST = 128
"""How many records of each process group a report has."""


@dataclass(frozen=True)
class Report:
    """place: where the main thread is, ("forward", "layers.3"); entered: the places entered since this forward, or backward, has begun

    ranks: of each process group; items: oldest first; failed: the place that an exception has ended, if no place was entered since
    call: that several ranks must make and that the main thread is in; of_call: these ranks; calls: how often this rank has made each
    """

    rank: int
    host: str
    pid: int
    place: tuple[str, str]
    entered: list[tuple[str, str]] = field(default_factory=list)
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    items: list[Record] = field(default_factory=list)
    stacks: str = ""
    failed: tuple[str, str] = ("", "")
    call: str = ""
    of_call: tuple[int, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        values = json.loads(text)
        values["place"], values["failed"] = tuple(values["place"]), tuple(values["failed"])
        values["entered"] = [tuple(each) for each in values["entered"]]
        values["ranks"] = {name: tuple(ranks) for name, ranks in values["ranks"].items()}
        values["of_call"] = tuple(values["of_call"])
        values["items"] = [Record(**{**item, "stage": Stage(item["stage"])}) for item in values["items"]]
        return cls(**values)


def report_of(rank: int, log: CollectiveLog) -> Report:
    """Make the report of this rank, in any thread."""
    by_group: dict[str, list[Record]] = {}
    for record in list(log.records):
        record.has_ended()  # asks the device, and notes its answer
        by_group.setdefault(record.group, []).append(replace(record, passed=None))
    items = [item for each in by_group.values() for item in each[-LAST:]]
    call = joint_calls.current
    return Report(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        place=log.place,
        entered=list(log.entered),
        ranks=dict(log.ranks),
        items=items,
        stacks=stacks(),
        failed=log.failed,
        call="" if call is None else call.name,
        of_call=() if call is None else tuple(sorted(joint_calls.expected(call))),
        calls=dict(joint_calls.counts),
    )


_BETWEEN = ("torch/nn/modules/module.py", "fsdp2/torch_names/torch_compiler.py", "fsdp2/sharded_class.py")
"""Files that call a module's forward, and hooks."""


def stacks() -> str:
    """The stacks of the main thread, and of threads that run our code, innermost call last, without the calls between modules."""
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    text = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main):
        name = named.get(ident, "unknown")
        if ident == main or (name.startswith("fsdp2_") and ident != threading.get_ident()):
            calls = [call for call in traceback.extract_stack(frame) if not call.filename.endswith(_BETWEEN)]
            text.append(f"thread {name}\n{''.join(traceback.format_list(calls)).rstrip()}")
    return "\n".join(text)


_LIBRARIES = [f"{os.path.dirname(package.__file__ or '')}{os.sep}" for package in (torch, os)]  # torch's and Python's
_OURS = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"


def lines_of_the_user(count: int = 4) -> str:
    """The innermost calls of the main thread that are neither torch's nor Python's nor ours, innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [call for call in traceback.extract_stack(frame) if not call.filename.startswith((_OURS, "<frozen", *_LIBRARIES))]
    return "".join(traceback.format_list(calls[-count:]))


class MainThread:
    """Whether the main thread works, as one watchdog sees it from look to look.

    clock: seconds; cpu_time: seconds that the main thread has computed, or None if the platform cannot tell
    """

    def __init__(self, clock: Callable[[], float], cpu_time: Callable[[], float | None]) -> None:
        self._clock, self._cpu_time = clock, cpu_time
        self._looked_at, self._computed = clock(), cpu_time()
        self._busy = 0

    def at(self) -> int:
        """A number that changes when the main thread has run Python code since the last look, and does not while it waits or sleeps.

        A look finds a short loop at the same instruction each time, since Python lets other threads run at few of them. So a thread
        that has computed for a twentieth of the time counts as well: one that waits takes less, and one on a crowded host may not get
        more.
        """
        now, computed = self._clock(), self._cpu_time()
        if computed is not None and self._computed is not None and computed - self._computed > 0.05 * (now - self._looked_at):
            self._busy += 1
        self._looked_at, self._computed = now, computed
        return hash((self._busy, *_frames()))


def cpu_time_of_main_thread() -> float | None:
    """Seconds; None on a platform without such a clock, and next to an accelerator, for which a thread computes while it waits."""
    main = threading.main_thread().ident
    if main is None or not hasattr(time, "pthread_getcpuclockid") or torch_tensors.default_device_type() != "cpu":
        return None
    return time.clock_gettime(time.pthread_getcpuclockid(main))


def _frames() -> list[int]:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    at = []
    while frame is not None:
        at += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return at
