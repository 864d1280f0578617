"""The device that runs nothing, and the log of what it is given: compiled once, one a process.

A device type ``clock`` of torch's PrivateUse1: the pretend accelerator's guard, hooks and ``torch.<device>`` module over streams,
memory, operators and collectives (``csrc/``) that only write down what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...core.comm.backends import declare_backend
from ..pretend import build, torch_names
from ..pretend.device_module import make_device_module
from .trace import Entry, Ranks, Trace

DEVICE_TYPE = BACKEND = "clock"
_NAME = "fsdp2_clock_device"
_SOURCES = Path(__file__).parent / "csrc"
_active: list[bool] = []
_groups: list[Ranks] = []


@cache
def _extension() -> Any:
    borrowed = [build.SOURCES / "hooks.cpp", build.SOURCES / "views.cpp"]
    folder = build.build_folder("clock", [*_SOURCES.iterdir(), *borrowed, *build.SOURCES.glob("*.h")])
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
        trace.entries.extend(Entry.of(row) for row in extension.take_log())
