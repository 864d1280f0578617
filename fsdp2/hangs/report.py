"""What one rank says of itself: its last collectives, where its main thread is, and its Python stacks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import asdict, dataclass, field, fields
from types import FrameType

from ..core.comm.collective_log import CollectiveLog, Stage

LAST = 128
"""Records of each process group that a report has."""


@dataclass(frozen=True)
class Item:
    """A record of ``CollectiveLog``, as other ranks get it. ended: it is complete; waited_for: the host, or a device, waits for it"""

    number: int
    group: str
    kind: str
    unit: str
    phase: str
    step: int
    numel: int
    dtype: str
    ended: bool
    waited_for: bool

    @property
    def sent(self) -> tuple[str, str, str, int, str]:
        """What must be equal on all ranks."""
        return self.kind, self.unit, self.phase, self.numel, self.dtype


_SHARED = [each.name for each in fields(Item) if each.name not in ("ended", "waited_for")]


@dataclass(frozen=True)
class Report:
    """place: what the main thread is in, ("forward", "layers.3"); entered: such places since this forward, or backward, has begun

    ranks: of each process group; items: oldest first
    """

    rank: int
    host: str
    pid: int
    place: tuple[str, str]
    entered: list[tuple[str, str]] = field(default_factory=list)
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    stacks: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        values = json.loads(text)
        values["place"] = tuple(values["place"])
        values["entered"] = [tuple(each) for each in values["entered"]]
        values["ranks"] = {name: tuple(ranks) for name, ranks in values["ranks"].items()}
        values["items"] = [Item(**item) for item in values["items"]]
        return cls(**values)


def report_of(rank: int, log: CollectiveLog) -> Report:
    """Called in any thread."""
    by_group: dict[str, list[Item]] = {}
    for record in list(log.records):
        ended = record.has_ended()
        waited_for = not ended and record.stage in (Stage.WAITING, Stage.QUEUED)
        of_record = {name: getattr(record, name) for name in _SHARED}
        by_group.setdefault(record.group, []).append(Item(**of_record, ended=ended, waited_for=waited_for))
    items = [item for each in by_group.values() for item in each[-LAST:]]
    return Report(rank, socket.gethostname(), os.getpid(), log.place, list(log.entered), dict(log.ranks), items, stacks())


_BETWEEN = ("torch/nn/modules/module.py", "fsdp2/core/torch_compat.py")  # files that call a module's forward, and hooks


def stacks() -> str:
    """Of the main thread, and of those that run our code, innermost call last; without the calls between modules."""
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    text = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main):
        name = named.get(ident, "unknown")
        if ident == main or (name.startswith("fsdp2_") and ident != threading.get_ident()):
            calls = [call for call in traceback.extract_stack(frame) if not call.filename.endswith(_BETWEEN)]
            text.append(f"thread {name}\n{''.join(traceback.format_list(calls)).rstrip()}")
    return "\n".join(text)


def main_thread_at() -> int:
    """A number that changes when the main thread runs Python code, and does not while it waits or sleeps."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    at = []
    while frame is not None:
        at += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return hash(tuple(at))
