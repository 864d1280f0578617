"""A device's streams that only write down what they are told, by numbers: 0 is compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from ..core.comm.streams import HostStreams, Streams

COMPUTE, COPY_IN, GATHER, REDUCE, ALL_REDUCE, OFFLOAD, COPY_OUT = range(7)


class Log(Protocol):
    """The log that gets the entries."""

    stream: int

    def put(self, kind: str, *, stream: int = 0, id: int = 0) -> None: ...

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None: ...


class WrittenStreams(Streams):
    """Streams of a CUDA-like device."""

    host_waits = False
    copy_in, gather, reduce, all_reduce, offload, copy_out = COPY_IN, GATHER, REDUCE, ALL_REDUCE, OFFLOAD, COPY_OUT

    def __init__(self, log: Log) -> None:
        self._log = log
        self._events = 0
        self.resize = log.resize  # type: ignore[method-assign]

    @property
    def compute(self) -> int:
        return self._log.stream

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self._log.stream = self._log.stream, stream
        try:
            yield
        finally:
            self._log.stream = before

    def mark(self, stream: int) -> int:
        self._events += 1
        self._log.put("record", stream=stream, id=self._events)
        return self._events

    def order(self, stream: int, event: int | None) -> None:
        if event is not None:
            self._log.put("wait", stream=stream, id=event)

    def synchronize(self, event: int | None) -> None:
        if event is not None:
            self._log.put("host waits for event", id=event)


class WrittenHost(HostStreams):
    """The CPU, whose storages are resized in sight."""

    def __init__(self, log: Log) -> None:
        self.resize = log.resize  # type: ignore[method-assign]
