"""A pretend accelerator: what a GPU may legally do to a program, on any computer, and the same way each time.

``activate()`` gives this process a device type ``pretend``. Its memory is host memory; its operators are the CPU's, so a program that
is right has bitwise the CPU's results. But each operator, copy and collective is queued on a stream and runs **late**: only when the
host waits for something, and only as much as that needs, streams taking turns in an order that a seed chooses. What a program has not
ordered, some seed brings into the wrong order. Memory belongs to streams, is given out again at once, and is poisoned when it is freed.

    pretend.activate()
    pretend.set_order(seed=3)
    x = torch.ones(4, device="pretend")
    with torch.pretend.stream(torch.Stream("pretend")):
        y = x + 1                     # not ordered after ``x``: with some seeds NaN
    y.sum().item()

It is for tests: it is slow, has one device a process, and cannot be taken back. It needs a C++ compiler and ninja, once
(``build.py``); docs/pretend_device.md says how it is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import torch_names
from .build import extension, library, missing_tools
from .device_module import make_device_module
from .process_group import BACKEND, MODEL, register_backends

DEVICE_TYPE = "pretend"
_active: list[bool] = []


def activate() -> None:
    """Make the device this process's accelerator. A second call does nothing. Importing does nothing."""
    if _active:
        return
    _active.append(True)
    torch_names.activate_meta_kernels()
    extension().register_hooks()
    torch_names.name_backend(DEVICE_TYPE, lambda: make_device_module(DEVICE_TYPE))
    register_backends(DEVICE_TYPE)


def set_order(seed: int | None) -> None:
    """How work runs from now on: late, in the order of ``seed``; None: at once, which every legal order must be equal to."""
    synchronize()
    extension().configure(seed or 0, seed is None)


def synchronize() -> None:
    """Run everything. Raises: what an operator raised late; memory written after it was freed."""
    extension().synchronize()


def host_waits() -> dict[str, int]:
    """How often the host waited for the device since ``reset_counts``, by reason."""
    counts: dict[str, int] = extension().host_waits()
    return counts


def launches() -> dict[str, int]:
    """How many collectives were launched since ``reset_counts``, by kind; coalesced ones count once."""
    counts: dict[str, int] = extension().launches()
    return counts


def reset_counts() -> None:
    """Count from 0."""
    extension().reset_counts()


@contextlib.contextmanager
def no_host_waits(*kinds: str) -> Iterator[None]:
    """Inside, waiting for the device is an error; with ``kinds``, for these reasons only."""
    extension().set_refused_waits(list(kinds), not kinds)
    try:
        yield
    finally:
        extension().set_refused_waits([], False)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside, work of the current stream, and of streams that wait for it, is taken for a graph capture's.

    What a capture refuses is an error: waiting for the device, asking events, ``record_stream``; an order after an event from
    outside of the capture; work on a stream that takes no part; an end that is not after all of the work. Later, so is an order
    after an event of the graph.
    """
    synchronize()
    extension().begin_capture(False)
    try:
        yield
    except BaseException:
        extension().end_capture(False)
        raise
    extension().end_capture(True)


@contextlib.contextmanager
def watching_streams() -> Iterator[dict[int, str]]:
    """Inside, work goes on as ever. Afterwards the dictionary has, by a stream's id, what a capture would have refused of streams."""
    refused: dict[int, str] = {}
    extension().begin_watch()
    try:
        yield refused
    finally:
        refused.update(extension().end_watch())


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Inside, the allocator reserves at most ``nbytes`` more than is in use now.

    Beyond that it waits for the device, gives back what is free, and tries again (``memory_stats()["retries"]``), as CUDA's does; then
    it raises ``torch.OutOfMemoryError``. Segments have no minimum size inside, and gaps in those from before are not used.
    """
    extension().release_cached_memory()
    extension().set_memory_limit(memory_stats()["reserved"] + nbytes)
    try:
        yield
    finally:
        extension().set_memory_limit(0)


@contextlib.contextmanager
def one_collective_at_a_time(patience: float) -> Iterator[None]:
    """Inside, a collective between processes keeps all others waiting, those of other communicators too, as it may on a full GPU.

    They run in the order in which this process issued them. Ranks that issue those of two communicators in different orders wait for
    each other: after ``patience`` seconds that is an error.
    """
    synchronize()
    extension().set_one_at_a_time(patience)
    try:
        yield
        synchronize()
    finally:
        extension().set_one_at_a_time(0)


@contextlib.contextmanager
def traced() -> Iterator[list[str]]:
    """Afterwards the list holds what ran, in order: ``"<stream> <kind> <name>"``."""
    ran: list[str] = []
    extension().set_tracing(True)
    try:
        yield ran
    finally:
        ran.extend(extension().take_trace())
        extension().set_tracing(False)


def memory_stats() -> dict[str, int]:
    """Bytes requested, allocated (rounded up) and reserved, and the most of each; blocks, allocations and retries so far, segments."""
    stats: dict[str, int] = extension().memory_stats()
    return stats


__all__ = [
    "BACKEND",
    "DEVICE_TYPE",
    "MODEL",
    "activate",
    "capturing",
    "host_waits",
    "launches",
    "library",
    "limited_memory",
    "memory_stats",
    "missing_tools",
    "no_host_waits",
    "one_collective_at_a_time",
    "reset_counts",
    "set_order",
    "synchronize",
    "traced",
    "watching_streams",
]
