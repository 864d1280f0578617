"""One interface over device streams and events, and over asynchronous collectives on the CPU.

The runtime names the stream of each piece of work, and its predecessors. On a device, this file makes CUDA streams and
events of that. On the host it makes nothing of it: collectives run on the backend's own threads, and the host waits for
each. So work that needs a collective's result is written as a generator, its *legs*, with a ``yield`` before each wait:
a device runs all legs at once, the host only up to the wait, and the rest where the result is needed.

    compute      the stream that the user's kernels run on: the current one
    copy_in      what comes before an all-gather: casts of shards, and their copies from the host
    gather       all-gathers and their copy-outs
    reduce       reduce-scatters and what follows them
    all_reduce   HSDP's second leg, which may overlap the next reduce-scatter
    offload      copies of activations to the host and back
    copy_out     copies of gradients to the host, for parameters that live there

Note: buffer lifetime. A block of device memory belongs to the stream that was current when it was allocated. When the
last reference is dropped, the allocator gives the block to later work of that stream, without waiting. So the runtime
keeps a reference until the owning stream has been ordered after the last use on any other stream.

Worked example, an all-gather that compute uses:

    streams.resize(storage, nbytes)                  # on compute: the storage is allocated and freed there only
    streams.order(streams.gather, streams.mark(streams.compute))
    with streams.on(streams.gather):
        ...                                          # collective and copy-out write into the storage
    gathered = streams.mark(streams.gather)
    streams.order(streams.compute, gathered)         # before the first use, and before any free
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

Stream = Any  # a device stream, or a name on the recording implementation, or None on the host
Event = Any


class Streams:
    """What the runtime needs of a device to order work. A method that has a body here suits most devices as it is."""

    host_waits: bool
    """True where no stream orders collectives: the host waits for their results."""

    copy_in: Stream
    gather: Stream
    reduce: Stream
    all_reduce: Stream

    offload: Stream
    copy_out: Stream
    compute: Stream
    """The stream that is current now."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Work started inside goes to ``stream``."""
        raise NotImplementedError

    def mark(self, stream: Stream) -> Event:
        """An event after the work that ``stream`` has been given so far."""

    def order(self, stream: Stream, event: Event) -> None:
        """Run later work of ``stream`` after ``event``; None stands for an event long past."""

    def run(self, legs: Iterator[None]) -> None:
        """Run ``legs``, which yields where it waits for a collective: on a device, where streams wait, to its end.

        On the host only to its first wait: whoever needs the result runs the rest, and all ranks in the same order.
        """
        for _ in legs:
            pass

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate (from 0) or free (to 0) ``storage`` on the current stream."""
        storage.resize_(nbytes)  # looked up at each call: memory trackers patch it

    def synchronize(self, event: Event) -> None:
        """Block the host until ``event`` has passed."""

    def has_passed(self, event: Event) -> bool:
        """Whether ``synchronize`` would not block; False while a graph is captured, when nobody may ask.

        Local: nothing that other ranks see may depend on it.
        """
        return True

    def is_capturing(self) -> bool:
        """Whether a graph of compute's work is being captured."""
        return False

    def join_capture(self, stream: Stream) -> None:
        """Let ``stream`` take part in the graph that is being captured, if any: others may then wait for its events."""


class _Nowhere:
    """A context that does nothing."""

    __enter__: Any = staticmethod("".format)
    __exit__: Any = __enter__


class HostStreams(Streams):
    """The CPU: work runs when it is started, one stream is all streams, and each event is long past.

    The methods that do nothing are functions in C, since calling a Python function takes longer.
    """

    host_waits = True
    compute = copy_in = gather = reduce = all_reduce = offload = copy_out = None
    on: Any = staticmethod(collections.defaultdict(_Nowhere).__getitem__)
    mark: Any = staticmethod({}.get)
    order: Any = mark
    synchronize: Any = mark
    run: Any = staticmethod(next)


class DeviceStreams(Streams):
    """A CUDA-like device, through its module (``torch.cuda``, ``torch.xpu``, ...)."""

    host_waits = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device.type)
        self._asks_capturing = getattr(self._module, "is_current_stream_capturing", None)
        # High priority: a collective's small copies should not queue after a large matrix product.
        self.copy_in = self._module.Stream(device=device, priority=-1)
        self.gather = self._module.Stream(device=device, priority=-1)
        self.reduce = self._module.Stream(device=device, priority=-1)
        self.all_reduce = self._module.Stream(device=device)

    @functools.cached_property
    def offload(self) -> Stream:
        return self._module.Stream(device=self._device)

    @functools.cached_property
    def copy_out(self) -> Stream:
        return self._module.Stream(device=self._device)

    @property
    def compute(self) -> Stream:
        return self._module.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def mark(self, stream: Stream) -> Event:
        return stream.record_event()

    def order(self, stream: Stream, event: Event) -> None:
        if event is not None:
            stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        if event is not None:
            event.synchronize()

    def has_passed(self, event: Event) -> bool:
        return event is None or (not self.is_capturing() and bool(event.query()))

    def is_capturing(self) -> bool:
        return self._asks_capturing is not None and bool(self._asks_capturing())

    @contextlib.contextmanager
    def as_in_capture(self) -> Iterator[None]:
        """Inside, the runtime does what it does in a capture. The caller synchronizes before and after."""
        asks, self._asks_capturing = self._asks_capturing, lambda: True
        try:
            yield
        finally:
            self._asks_capturing = asks

    def join_capture(self, stream: Stream) -> None:
        if self.is_capturing():
            stream.wait_event(self.compute.record_event())


_streams: dict[torch.device, Streams] = {}


def streams_of(device: torch.device) -> Streams:
    """This process's one set of streams of ``device``: roots that share streams do not fragment each other's memory."""
    found = _streams.get(device)
    if found is None:
        found = _streams[device] = HostStreams() if device.type == "cpu" else DeviceStreams(device)
    return found


@contextlib.contextmanager
def use_streams(device: torch.device, streams: Streams) -> Any:
    """Use ``streams`` for ``device`` inside; modules sharded inside keep them. For the recording implementation."""
    before = streams_of(device)
    _streams[device] = streams
    try:
        yield streams
    finally:
        _streams[device] = before
