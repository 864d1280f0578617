"""The device that runs nothing, and the log of what it is given: compiled once, one a process.

Why a device type of its own, and not a dispatch mode over fake tensors, or the pretend accelerator in a mode that runs nothing:
streams, events, ``record_stream``, storage resizes and autograd's own thread are asked of a device, so both libraries take the paths
here that they take on a GPU, and nothing of either is replaced. Under a dispatch mode they would take the CPU's, and a Python call an
operator would drown the host's time. The pretend accelerator orders real data, seeds its executor and holds each entry's tensors; of
its files, this device shares those that say the same (guard, hooks, ``torch.<device>`` module) and nothing that runs.

A device type ``clock`` of torch's PrivateUse1: the pretend accelerator's guard, hooks and ``torch.<device>`` module over streams,
memory, operators and collectives (the C++ files here) that only write down what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp2.core.comm.backends import declare_backend
from fsdp2.testing.clock.trace import Entry, Ranks, Seen, Trace
from fsdp2.testing.pretend import build, torch_names
from fsdp2.testing.pretend.device_module import make_device_module

DEVICE_TYPE = BACKEND = "clock"
_NAME = "fsdp2_clock_device"
_SOURCES = Path(__file__).parent
_active: list[bool] = []
_groups: list[Ranks] = []


@cache
def _extension() -> Any:
    borrowed = [build.SOURCES / "hooks.cpp", build.SOURCES / "views.cpp"]
    folder = build.build_folder("clock", [*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"), *borrowed, *build.SOURCES.glob("*.h")])
    return build.load(_NAME, build.compiled(_NAME, folder, [*_SOURCES.glob("*.cpp"), *borrowed]))


def activate() -> None:
    """Make the device this process's accelerator, and ``clock`` a backend. A second call does nothing; neither does importing."""
    if _active:
        return
    _active.append(True)
    torch_names.activate_meta_kernels()
    extension = _extension()
    extension.register_hooks()
    torch_names.name_backend(DEVICE_TYPE, lambda: make_device_module(DEVICE_TYPE, extension))
    dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=[DEVICE_TYPE])
    declare_backend(BACKEND, averages=True)


def _make_group(options: Any, _: Any) -> Any:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    _groups.append(ranks)
    return _extension().make_group(options.group_rank, options.group_size, len(_groups) - 1)


def mark(name: str) -> None:
    """Write down that the program has come to ``name``, where a phase begins."""
    _extension().mark(name)


@contextlib.contextmanager
def logged() -> Iterator[Trace]:
    """Afterwards the trace holds what the device was given inside, by all threads."""
    trace = Trace(entries=[], groups=_groups)
    extension = _extension()
    extension.take_log()
    extension.set_logging(True)
    try:
        yield trace
    finally:
        extension.set_logging(False)
        trace.entries.extend(map(_entry_of, extension.take_log()))


def _entry_of(row: tuple[Any, ...]) -> Entry:
    """Read the device's log."""
    kind, name, stream, id_, other, nbytes, tensors, host_ns = row
    seen = tuple(Seen(bool(roles & 1), bool(roles & 2), dtype, size, tuple(sizes)) for roles, dtype, size, sizes in tensors)
    return Entry(kind, name, stream, id_, other, nbytes, seen, host_ns * 1e-9)
