"""Streams that only record, and a check that everything that touches a buffer is ordered: races on a device, found on the CPU.

``RecordingStreams`` implements ``streams.Streams`` with named streams. All work runs at once, in program order, so every value is
right; meanwhile each operator's reads, writes, allocations and frees are filed under the stream that was current, and compared
with what came before by vector clocks. Two touches of one byte, at least one a write, are a race unless stream order or events put
one after the other: a device may run them in either order.

    with recording() as streams:           # modules sharded inside use ``streams``; leaving raises RaceError
        fully_shard(model, mesh=mesh)
        train(model)

Worked example; a clock is {stream: how far it is known to have come}, and every mark moves its own stream one further:

    compute  {compute: 1}    allocates and fills b at (compute, 1)
    event = mark(compute)    {compute: 1}; compute goes on at {compute: 2}
    order(gather, event)     gather {gather: 1, compute: 1}: it may touch b, for 1 >= 1
    gather reads b at (gather, 1)
    compute writes b         compute {compute: 2} knows nothing of gather: a race with the read

Memory is known by its address, for a sharded parameter has a storage object of its own inside the flat shard's memory. A block
belongs to the stream that was current when it was allocated. When its last storage dies, or is resized to nothing, the
allocator may hand it out again to what its stream runs next; from then on that stream must be ordered after every touch of
it on other streams (see Note: buffer lifetime). So the check comes with the next operator on that stream, not with the free.

What it cannot see: memory that kernels use inside; the bytes between a strided tensor's first and last that are not its own (it
takes them for touched); what other ranks do; and orders that the device gives by accident. A blocking read (``item``,
``tolist``) must itself be ordered, but orders nothing here: a user's ``loss.item()`` must not hide a race.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp2.core.comm.streams import Event, Stream, use_streams
from harness.recording.operators import watched
from harness.recording.touches import Memory, Race, Touch, extent, frames

Clock = dict[Stream, int]
_HOST = "host"
"""The stream of operators on host memory. Their work is past for everything that starts later."""


class RaceError(AssertionError):
    """Touches of the same memory that nothing orders."""


@dataclass(slots=True)
class _Holder:
    """A storage that was seen: where its memory was then."""

    reference: weakref.ref[torch.UntypedStorage]
    start: int
    stop: int
    memory: Memory | None


# ---- the streams -------------------------------------------------------------------------------------------------------------


class RecordingStreams:
    """A device's streams (see ``streams.Streams``) on which nothing runs later. A user's stream may be any hashable value.

    A third of its attributes are names of streams.

    races: the races found
    """

    host_waits = False
    copy_in: Stream = "copy_in"
    gather: Stream = "gather"
    reduce: Stream = "reduce"
    all_reduce: Stream = "all_reduce"
    offload: Stream = "offload"
    copy_out: Stream = "copy_out"

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._seen_races: set[tuple[object, ...]] = set()
        self._current: list[Stream] = ["compute"]
        self._clocks: dict[Stream, Clock] = {}
        self._host: Clock = {}
        self._holders: dict[int, _Holder] = {}
        self._starts: list[int] = []  # of all memory, ascending
        self._memories: dict[int, Memory] = {}  # by its start
        self._freed: dict[Stream, list[tuple[Memory, Touch]]] = {}
        self._has_host_memory = False
        self._to_device = False  # while host memory is copied to the device

    # --- the protocol ---

    @property
    def compute(self) -> Stream:
        return self._current[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def mark(self, stream: Stream) -> Event:
        clock = self._clock(stream)
        event = clock.copy()
        clock[stream] += 1
        return event

    def order(self, stream: Stream, event: Event) -> None:
        if event is not None:
            _advance(self._clock(stream), event)

    def run(self, legs: Iterator[None]) -> None:
        for _ in legs:
            pass

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage.nbytes() == nbytes:
            return
        holder = self._holder(storage)
        if holder.memory is not None:
            self._let_go(storage._cdata)
        storage.resize_(nbytes)
        if nbytes > 0:
            self._reuse()
            self._register(storage, self._touch_now("resize"))

    def synchronize(self, event: Event) -> None:
        if event is not None:
            self._host_waits_for(event)

    def has_passed(self, event: Event) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def join_capture(self, stream: Stream) -> None:
        pass

    # --- results ---

    def check(self) -> None:
        """Raise RaceError if there was a race."""
        if self.races:
            listed = "\n".join(f"{number}. {race}" for number, race in enumerate(self.races, 1))
            raise RaceError(f"{len(self.races)} race(s)\n{listed}")

    def keep_on_host(self, tensor: Tensor) -> None:
        """From now on ``tensor``'s memory is the host's, as with CPU offload; so is memory allocated with ``pin_memory=True``.

        Operators on such memory alone run on the host. ``.to(torch.device(...))`` of it is a copy to the device.
        """
        memory = self._memory_of(tensor)
        if memory is not None:
            memory.is_host = self._has_host_memory = True
            memory.forget()

    # --- clocks ---

    def _clock(self, stream: Stream) -> Clock:
        clock = self._clocks.get(stream)
        if clock is None:
            clock = self._clocks[stream] = {**self._host, stream: 1}
        return clock

    def _host_waits_for(self, event: Clock) -> None:
        _advance(self._host, event)
        for clock in self._clocks.values():  # work that starts from now on starts after the wait
            _advance(clock, event)

    def _touch_now(self, what: str, stream: Stream | None = None) -> Touch:
        stream = self._current[-1] if stream is None else stream
        return Touch(stream, 0 if stream is _HOST else self._clock(stream)[stream], what, frames())

    def _is_ordered(self, earlier: Touch, later: Touch) -> bool:
        if earlier.stream is _HOST:
            return True
        clock = self._host if later.stream is _HOST else self._clock(later.stream)
        return clock.get(earlier.stream, 0) >= earlier.tick

    def _report(self, how: str, earlier: Touch, later: Touch, memory: Memory) -> None:
        key = (how, earlier.site, later.site)
        if key not in self._seen_races:
            self._seen_races.add(key)
            self.races.append(Race(how, earlier, later, str(memory)))

    # --- memory ---

    def _holder(self, storage: torch.UntypedStorage, allocated: Touch | None = None) -> _Holder:
        """What is known of ``storage``; if it is new, or has moved, its memory is taken for new or for older."""
        holder = self._holders.get(storage._cdata)
        if holder is not None:
            start = storage.data_ptr()
            if holder.start == start and holder.stop == start + storage.nbytes():
                return holder
            self._let_go(storage._cdata)
        return self._register(storage, allocated)

    def _register(self, storage: torch.UntypedStorage, allocated: Touch | None) -> _Holder:
        key = storage._cdata
        start = storage.data_ptr()
        stop = start + storage.nbytes()
        memory = self._memory_at(start, stop, allocated) if stop > start else None
        known = self._holders.get(key)
        reference = known.reference if known is not None else weakref.ref(storage, lambda _: self._died(key))
        holder = self._holders[key] = _Holder(reference, start, stop, memory)
        if memory is not None:
            memory.holders.add(key)
        return holder

    def _memory_at(self, start: int, stop: int, allocated: Touch | None) -> Memory:
        first = bisect.bisect_right(self._starts, start)
        if first > 0 and self._memories[self._starts[first - 1]].stop > start:
            first -= 1
        last = bisect.bisect_left(self._starts, stop, lo=first)
        parts = [self._memories[address] for address in self._starts[first:last]]
        if len(parts) == 1 and parts[0].start <= start and stop <= parts[0].stop:
            return parts[0]
        is_host = allocated is not None and allocated.stream is _HOST
        if parts:  # a piece of it was seen first
            start, stop, allocated = min(start, parts[0].start), max(stop, parts[-1].stop), None
            is_host = any(part.is_host for part in parts)
        memory = Memory(start, stop, allocated, is_host)
        for part in parts:
            memory.absorb(part)
            memory.holders |= part.holders
            for key in part.holders:
                self._holders[key].memory = memory
            del self._memories[part.start]
        self._starts[first:last] = [start]
        self._memories[start] = memory
        return memory

    def _memory_of(self, tensor: Tensor) -> Memory | None:
        return self._holder(tensor.untyped_storage()).memory

    def _died(self, key: int) -> None:
        self._let_go(key)
        del self._holders[key]

    def _let_go(self, key: int) -> None:
        """The storage does not hold its memory any more; if it was the last, the memory goes back to its stream."""
        holder = self._holders[key]
        memory, holder.memory = holder.memory, None
        holder.start = holder.stop = 0
        if memory is None:
            return
        memory.holders.discard(key)
        if memory.holders:
            return
        del self._memories[memory.start]
        self._starts.remove(memory.start)
        if memory.allocated is not None and not memory.is_host:  # the host's allocator knows which copies still run
            self._freed.setdefault(memory.allocated.stream, []).append((memory, self._touch_now("free")))

    def _reuse(self) -> None:
        """The current stream may be given any block that was freed on it: is it ordered after all that touched them?"""
        freed = self._freed.pop(self._current[-1], None)
        if freed is None:
            return
        later = None
        for memory, free in freed:
            for earlier in memory.last_touches():
                later = later or self._touch_now("re-use of freed memory")
                if not self._is_ordered(earlier, later):
                    how = f"freed while still in use, by {free}"
                    self._report(how, earlier, later, memory)

    def _touch(self, tensor: Tensor, touch: Touch, write: bool) -> None:
        memory = self._memory_of(tensor)
        if memory is None:
            assert tensor.numel() == 0, f"{touch}: used after its storage was freed"
            return
        start, stop = extent(tensor)
        if stop > start:
            for earlier in memory.touch(start, stop, touch, write):
                if not self._is_ordered(earlier, touch):
                    verb = "writes" if write else "reads"
                    where = f"bytes [{start - memory.start}, {stop - memory.start})"
                    self._report(f"{touch.what} on {touch.stream} {verb} {where} too early", earlier, touch, memory)

    # --- operators ---

    def before_operator(
        self, what: str, reads: list[Tensor], writes: list[Tensor], others: list[Tensor], blocks: bool = False
    ) -> Touch:
        """An operator is about to run on the current stream; or on the host, if it knows host memory only.

        blocks: if it is a copy between host and device, the host waits for it
        """
        stream = self._current[-1]
        between = False
        if self._has_host_memory and not self._to_device:
            memories = [memory for tensor in (*reads, *writes, *others) if (memory := self._memory_of(tensor)) is not None]
            kinds = {memory.is_host for memory in memories}
            between = len(kinds) == 2
            if kinds == {True}:
                stream = _HOST
        if stream is not _HOST:
            self._reuse()
        touch = self._touch_now(what, stream)
        for tensor in reads:
            self._touch(tensor, touch, write=False)
        for tensor in writes:
            self._touch(tensor, touch, write=True)
        if between and blocks:
            self._host_waits_for(self.mark(stream))
        return touch

    def after_operator(self, touch: Touch, outputs: list[Tensor]) -> None:
        for tensor in outputs:
            self._holder(tensor.untyped_storage(), touch)

    @contextlib.contextmanager
    def transfer(self, tensor: Tensor, target: object, non_blocking: bool) -> Iterator[bool]:
        """Inside, ``tensor.to(target)`` runs; yields whether that is a copy of host memory to the device."""
        if self._has_host_memory and isinstance(target, torch.device):
            memory = self._memory_of(tensor)
            self._to_device = memory is not None and memory.is_host
        copies = self._to_device
        try:
            yield copies
        finally:
            self._to_device = False
        if copies and not non_blocking:
            self._host_waits_for(self.mark(self._current[-1]))

    def watching(self) -> AbstractContextManager[None]:
        """Inside, operators are recorded."""
        return watched(by=self)


@contextlib.contextmanager
def recording(streams: RecordingStreams | None = None, device_type: str = "cpu") -> Iterator[RecordingStreams]:
    """Modules sharded inside run on recording streams. Raises RaceError at the end, unless something else was raised."""
    streams = RecordingStreams() if streams is None else streams
    with use_streams(torch.device(device_type), streams), streams.watching():
        yield streams
    streams.check()


def _advance(clock: Clock, event: Clock) -> None:
    for stream, tick in event.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


__all__ = ["Race", "RaceError", "RecordingStreams", "Touch", "recording"]
