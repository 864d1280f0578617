"""Streams that only record, and a check that whatever touches a buffer is ordered: races on a device, found on the CPU.

``RecordingStreams`` implements ``streams.Streams`` with named streams. All work runs at once, in program order, so every value
is right; meanwhile each operator's reads, writes, allocations and frees are filed under the stream that was current, and
compared with what came before by vector clocks. Two touches of one byte, at least one a write, are a race unless stream order or
events put one behind the other: a device may run them in either order. It refuses to know parameters, groups and schedules.

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
allocator may hand it out again to whatever its stream runs next; from then on that stream must be ordered behind every touch of
it on other streams (see Note: buffer lifetime). So the check comes with the next operator on that stream, not with the free.

What it cannot see: memory that kernels use inside; the bytes between a strided tensor's first and last that are not its own (it
takes them for touched); what other ranks do; and orders that the device gives by accident. A blocking read (``item``,
``tolist``) must itself be ordered, but orders nothing here: a user's ``loss.item()`` must not hide a race.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import torch_compat as compat
from ..core.comm.streams import Event, Stream, use_streams

Clock = dict[Stream, int]
_HOST = "host"
"""Where operators on host memory run. What it did is past for everything that is started later."""


class RaceError(AssertionError):
    """Touches of the same memory that nothing orders."""


# ---- what is remembered ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Touch:
    """One operator at one point of one stream. where: (file, line, function) of the Python frames, innermost first."""

    stream: Stream
    tick: int
    what: str
    where: tuple[tuple[str, int, str], ...]

    def __str__(self) -> str:
        frames = " < ".join(f"{os.path.basename(file)}:{line} {function}" for file, line, function in self.where)
        return f"{self.what} on {self.stream}, at {frames}"

    @property
    def site(self) -> tuple[object, ...]:
        return (self.stream, self.what, self.where)


@dataclass(frozen=True, slots=True)
class Race:
    """``later`` was started after ``earlier``, but nothing makes it run after.

    how:    in words; {earlier} and {later} stand for the operators
    memory: what is known of the buffer
    """

    how: str
    earlier: Touch
    later: Touch
    memory: str

    def __str__(self) -> str:
        return f"{self.how}\n    earlier  {self.earlier}\n    later    {self.later}\n    buffer   {self.memory}"


class _Cell:
    """The last touches of a range of bytes; a write leaves nothing before it to remember."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Touch | None, reads: dict[Stream, Touch]) -> None:
        self.write = write
        self.reads = reads


class _Memory:
    """One allocation: [start, stop) in cells, cell i from ``starts[i]`` to the next start.

    allocated: None if we did not see it: before the recording, or inside an operator; then its owner is not known
    holders: the storages (``_cdata``) that keep it
    """

    __slots__ = ("allocated", "cells", "holders", "is_host", "start", "starts", "stop")

    def __init__(self, start: int, stop: int, allocated: Touch | None, is_host: bool) -> None:
        self.start = start
        self.stop = stop
        self.allocated = allocated
        self.is_host = is_host
        self.holders: set[int] = set()
        self.starts = [start]  # of the cells
        self.cells = [_Cell(allocated, {})]

    def __str__(self) -> str:
        size = f"{self.stop - self.start} bytes"
        return f"{size}, whose allocation was not recorded" if self.allocated is None else f"{size}, by {self.allocated}"

    def _cut(self, address: int) -> int:
        """The index of the cell that begins at ``address``, cutting one in two if need be."""
        if address == self.stop:
            return len(self.cells)
        index = bisect.bisect_right(self.starts, address) - 1
        if self.starts[index] != address:
            index += 1
            before = self.cells[index - 1]
            self.starts.insert(index, address)
            self.cells.insert(index, _Cell(before.write, before.reads.copy()))
        return index

    def touch(self, start: int, stop: int, touch: Touch, write: bool) -> list[Touch]:
        """Remember ``touch`` of [start, stop); returns the earlier ones that must be ordered before it."""
        first, last = self._cut(start), self._cut(stop)
        before: list[Touch] = []
        for cell in self.cells[first:last]:
            if cell.write is not None:
                before.append(cell.write)
            if write:
                before.extend(cell.reads.values())
            else:
                cell.reads[touch.stream] = touch
        if write:
            self.starts[first:last] = [start]
            self.cells[first:last] = [_Cell(touch, {})]
        return before

    def last_touches(self) -> list[Touch]:
        found = {}
        for cell in self.cells:
            for touch in (cell.write, *cell.reads.values()):
                if touch is not None:
                    found[id(touch)] = touch
        return list(found.values())

    def forget(self) -> None:
        """All that came before is past."""
        self.starts = [self.start]
        self.cells = [_Cell(None, {})]

    def absorb(self, other: _Memory) -> None:
        """``other`` turned out to be a part of this one."""
        first, last = self._cut(other.start), self._cut(other.stop)
        self.starts[first:last] = other.starts
        self.cells[first:last] = other.cells


@dataclass(slots=True)
class _Holder:
    """A storage that was seen: where its memory was then."""

    reference: weakref.ref[torch.UntypedStorage]
    start: int
    stop: int
    memory: _Memory | None


# ---- the streams -------------------------------------------------------------------------------------------------------------


class RecordingStreams:
    """A device's streams (see ``streams.Streams``) on which nothing runs later. A user's stream may be any hashable value.

    races:          what was found
    passes_at_once: ``has_passed`` is True, as on a device that is quicker than the host; else only once it must be
    """

    host_waits = False
    gather: Stream = "gather"
    reduce: Stream = "reduce"
    all_reduce: Stream = "all_reduce"

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.passes_at_once = False
        self._seen_races: set[tuple[object, ...]] = set()
        self._current: list[Stream] = ["compute"]
        self._clocks: dict[Stream, Clock] = {}
        self._host: Clock = {}
        self._holders: dict[int, _Holder] = {}
        self._starts: list[int] = []  # of all memory, ascending
        self._memories: dict[int, _Memory] = {}  # by its start
        self._freed: dict[Stream, list[tuple[_Memory, Touch]]] = {}
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

    def has_passed(self, event: Event) -> bool:
        if self.passes_at_once:
            self.synchronize(event)
        return event is None or all(self._host.get(stream, 0) >= tick for stream, tick in event.items())

    def synchronize(self, event: Event) -> None:
        if event is not None:
            self._host_waits_for(event)

    # --- results ---

    def check(self) -> None:
        """Raise RaceError if there was a race."""
        if self.races:
            listed = "\n".join(f"{number}. {race}" for number, race in enumerate(self.races, 1))
            raise RaceError(f"{len(self.races)} race(s)\n{listed}")

    def keep_on_host(self, tensor: Tensor) -> None:
        """From now on ``tensor``'s memory is the host's, as with CPU offload; so is what is allocated with ``pin_memory=True``.

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
        for clock in self._clocks.values():  # whatever is started from now on is started after the wait
            _advance(clock, event)

    def _touch_now(self, what: str, stream: Stream | None = None) -> Touch:
        stream = self._current[-1] if stream is None else stream
        return Touch(stream, 0 if stream is _HOST else self._clock(stream)[stream], what, _frames())

    def _is_ordered(self, earlier: Touch, later: Touch) -> bool:
        if earlier.stream is _HOST:
            return True
        clock = self._host if later.stream is _HOST else self._clock(later.stream)
        return clock.get(earlier.stream, 0) >= earlier.tick

    def _report(self, how: str, earlier: Touch, later: Touch, memory: _Memory) -> None:
        key = (how, earlier.site, later.site)
        if key not in self._seen_races:
            self._seen_races.add(key)
            self.races.append(Race(how, earlier, later, str(memory)))

    # --- memory ---

    def _holder(self, storage: torch.UntypedStorage, allocated: Touch | None = None) -> _Holder:
        """What is known of ``storage``; if it was not seen before, or has moved, its memory is taken for new or for older."""
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

    def _memory_at(self, start: int, stop: int, allocated: Touch | None) -> _Memory:
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
        memory = _Memory(start, stop, allocated, is_host)
        for part in parts:
            memory.absorb(part)
            memory.holders |= part.holders
            for key in part.holders:
                self._holders[key].memory = memory
            del self._memories[part.start]
        self._starts[first:last] = [start]
        self._memories[start] = memory
        return memory

    def _memory_of(self, tensor: Tensor) -> _Memory | None:
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
        """The current stream may be given any block that was freed on it: is it ordered behind all that touched them?"""
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
        start, stop = _extent(tensor)
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

    def watching(self) -> AbstractContextManager[Any]:
        """Inside, operators are recorded."""
        stack = contextlib.ExitStack()
        stack.enter_context(_replaced_functions(self))
        stack.enter_context(_Operators(self))
        return stack


@contextlib.contextmanager
def recording(streams: RecordingStreams | None = None, device_type: str = "cpu") -> Iterator[RecordingStreams]:
    """Modules sharded inside run on recording streams. Raises RaceError at the end, unless something else was raised."""
    streams = RecordingStreams() if streams is None else streams
    with use_streams(torch.device(device_type), streams), streams.watching():
        yield streams
    streams.check()


# ---- seeing operators --------------------------------------------------------------------------------------------------------


class _Operators(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Files every operator that runs under it, in backward as well: on the CPU, that is on the calling thread."""

    def __init__(self, streams: RecordingStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        subclasses = [kind for kind in types if compat.has_own_dispatch(kind)]
        if compat.FakeTensor in subclasses:  # it has no memory
            return func(*args, **kwargs)
        if subclasses:
            return NotImplemented  # a DTensor, say: it comes back with its local tensors
        roles = _roles.get(func)
        if roles is None:
            roles = _roles[func] = _Roles(func)
        if roles.is_view:
            return func(*args, **kwargs)
        blocks = roles.name == "aten.copy_" and not (kwargs.get("non_blocking", False) or args[2:] == (True,))
        touch = self._streams.before_operator(roles.name, *roles.sort(args, kwargs), blocks=blocks)
        result = func(*args, **kwargs)
        outputs: list[Tensor] = []
        _find(result, outputs)
        self._streams.after_operator(touch, outputs)
        return result


@contextlib.contextmanager
def _replaced_functions(streams: RecordingStreams) -> Iterator[None]:
    """See what is no operator: reads by the host, ``to``, which from CPU to CPU does nothing, and pinned memory.

    By replacing functions: torch function modes, which are made for this, are not active in backward.
    """

    def seen_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is Tensor and args:
            with streams.transfer(tensor, args[0], kwargs.get("non_blocking", False)) as must_copy:
                return to(tensor, *args, **({**kwargs, "copy": True} if must_copy else kwargs))
        return to(tensor, *args, **kwargs)

    def seen_read(read: Any) -> Any:
        def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads: list[Tensor] = []
            _find(tensor, reads)
            streams.before_operator(read.__name__, reads, [], [])
            return read(tensor, *args, **kwargs)

        return seen

    def seen_allocation(allocate: Any) -> Any:
        def seen(*args: Any, **kwargs: Any) -> Any:
            tensor = allocate(*args, **{**kwargs, "pin_memory": False})
            if kwargs.get("pin_memory"):
                streams.keep_on_host(tensor)
            return tensor

        return seen

    to = Tensor.to
    methods = {"to": seen_to, "tolist": seen_read(Tensor.tolist), "numpy": seen_read(Tensor.numpy)}
    functions = {"empty": torch.empty, "zeros": torch.zeros}
    for name, method in methods.items():
        assert name not in vars(Tensor), f"another recording is active: Tensor.{name} is replaced"
        setattr(Tensor, name, method)
    for name, function in functions.items():
        setattr(torch, name, seen_allocation(function))
    try:
        yield
    finally:
        for name in methods:
            delattr(Tensor, name)  # the methods themselves are its base class's
        for name, function in functions.items():
            setattr(torch, name, function)


# c10d's schemas do not say what they write.
_COLLECTIVE_WRITES = {
    "_allgather_base_": {"output_tensor"},
    "_reduce_scatter_base_": {"output_tensor"},
    "allgather_": {"output_tensors"},
    "allgather_coalesced_": {"output_lists"},
    "allgather_into_tensor_coalesced_": {"outputs"},
    "allreduce_": {"tensors"},
    "allreduce_coalesced_": {"tensors"},
    "alltoall_": {"output_tensors"},
    "alltoall_base_": {"output"},
    "barrier": set(),
    "broadcast_": {"tensors"},
    "gather_": {"output_tensors"},
    "recv_": {"tensors"},
    "recv_any_source_": {"tensors"},
    "reduce_": {"tensors"},
    "reduce_scatter_": {"output_tensors"},
    "reduce_scatter_tensor_coalesced_": {"outputs"},
    "scatter_": {"output_tensors"},
    "send": set(),
}

# These look at shapes, or set them, but touch no element of their arguments.
_SHAPE_ONLY = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_pinned", "is_same_size"),
    *("_unsafe_view", "set_", "resize_", "resize_as_", "record_stream", "barrier"),
}


class _Roles:
    """Which arguments of one operator are read, and which are written."""

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        namespace, _, base = schema.name.partition("::")
        self.name = f"{namespace}.{base}"
        aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
        self.is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
        self._names = [argument.name for argument in schema.arguments]
        self._touches = base not in _SHAPE_ONLY
        if namespace == "c10d":
            self._writes = _COLLECTIVE_WRITES.get(base, set(self._names))
        else:
            self._writes = {
                argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
            }

    def sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The tensors that are read, those that are written, and those of which neither is true."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            _find(value, writes if name in self._writes else reads)
        return (reads, writes, []) if self._touches else ([], [], reads + writes)


_roles: dict[Any, _Roles] = {}


def _find(value: Any, found: list[Tensor]) -> None:
    """The tensors in ``value`` that have memory."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_meta and not compat.has_own_dispatch(type(value)):
            found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _find(item, found)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses [start, stop) from the first to the last byte of ``tensor``."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _advance(clock: Clock, event: Clock) -> None:
    for stream, tick in event.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


_LEAVE_OUT = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(contextlib.__file__) + os.sep + "contextlib", __file__)


def _frames(most: int = 5) -> tuple[tuple[str, int, str], ...]:
    """The innermost frames of Python code that is neither torch's nor ours."""
    found: list[tuple[str, int, str]] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < most:  # type: ignore[redundant-expr]
        code = frame.f_code
        if not code.co_filename.startswith(_LEAVE_OUT):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


__all__ = ["Race", "RaceError", "RecordingStreams", "Touch", "recording"]
