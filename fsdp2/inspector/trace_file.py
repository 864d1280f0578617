"""``trace``: what all ranks do in a few steps, on one clock, as a file for Perfetto."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from ..arguments import SWITCH, require
from ..inspect import exchange, listen
from ..lifecycle import UntilStopped
from ..torch_names import torch_autograd, torch_compiler
from .chrome import events_of
from .clock import Offset, measure
from .memory_now import all_kept_bytes, training_device
from .moments import Moments, Sample
from .run_folder import Values, drop_absent_ranks, folder_of, rank_file, rank_files, write_json


class trace(UntilStopped):  # noqa: N801 (called as a function is)
    """Record modules, collectives and bytes, from now until the end of the ``with`` block, or until ``stop()``.

    ``folder/trace.json`` shows them, at https://ui.perfetto.dev for instance.

    folder:      each rank writes trace.rank<N>.json there; rank 0 merges those that it sees
    allocations: on a CPU, let torch's profiler count what is allocated, activations included: each operator takes longer then. While
                 a profiler of yours runs, they are left out
    Collective:  yes, over all ranks of the job: at the beginning ranks compare clocks, at the end rank 0 waits for all files. A block
                 that an exception leaves communicates nothing more, and only its ranks' own files are written

    Example:
        with fsdp2.trace(folder):
            model(x).sum().backward()
            optimizer.step()
    """

    def __init__(self, folder: Any, *, allocations: bool = True) -> None:
        self._folder = folder_of(folder, "trace")
        require("trace", SWITCH, allocations=allocations)
        self._allocations = allocations
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        super().__init__()

    def _begin(self, undo: contextlib.ExitStack) -> None:
        drop_absent_ranks(self._folder, "trace", "json", self._num_ranks)
        device = training_device()
        self._moments = moments = Moments(allocated=_allocator_of(device))
        self._offset = measure()
        self._kept_before, self._records = all_kept_bytes(), None
        undo.push(self._write)
        undo.callback(listen(moments))
        before, after = (torch_compiler.dynamo_disabled(each) for each in (self._begin_optimizer, self._end_optimizer))
        undo.callback(register_optimizer_step_pre_hook(before).remove)
        undo.callback(register_optimizer_step_post_hook(after).remove)
        counts = self._allocations and device.type == "cpu" and not torch_autograd.profiler_is_on()
        if counts:
            self._records = undo.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))

    def _begin_optimizer(self, *_: Any) -> None:
        self._moments.begin_optimizer()

    def _end_optimizer(self, *_: Any) -> None:
        self._moments.end_optimizer()

    def _write(self, kind: type[BaseException] | None, *_: object) -> None:
        """Collective: yes, unless an exception of this ``kind`` ends the block"""
        if self._records is not None:
            self._moments.samples += _allocated(self._kept_before, _allocations_in(self._records))
        write_json(rank_file(self._folder, "trace", self._rank, "json"), _file_of(self._rank, self._moments, self._offset))
        if kind is None:
            exchange(None)
            if self._rank == 0:
                merge(self._folder)


def merge(folder: Path) -> None:
    """One file of those of all ranks."""
    found = [json.loads(path.read_text()) for _, path in rank_files(folder, "trace", "json")]
    events = [event for each in found for event in each["traceEvents"]]
    write_json(folder / "trace.json", {"traceEvents": events, "metadata": {"clocks": [each["metadata"] for each in found]}})


def _file_of(rank: int, moments: Moments, offset: Offset) -> Values:
    said = {"rank": rank, "clock_ahead_ns": offset.ahead, "uncertainty_ns": offset.uncertainty}
    return {"traceEvents": events_of(rank, moments.spans, moments.samples, offset), "metadata": said}


def _allocator_of(device: torch.device) -> Callable[[], int] | None:
    asks = getattr(torch.get_device_module(device.type), "memory_allocated", None)
    return None if asks is None else lambda: int(asks(device))


def _allocated(before: int, events: list[tuple[int, int]]) -> list[Sample]:
    """Sums, with neighbors that lie within 10 us joined to one, the highest."""
    samples: list[Sample] = []
    now = before
    since = highest = 0
    for at, nbytes in events:
        now += nbytes
        if samples and at - since < 10_000:
            if now > highest:
                highest = now
                samples[-1] = Sample(since, {"allocated": now})
        else:
            since, highest = at, now
            samples.append(Sample(at, {"allocated": now}))
    return samples


def _allocations_in(records: Any) -> list[tuple[int, int]]:
    """(when, bytes), freed ones negative, of a ``torch.profiler.profile`` with ``profile_memory`` that has ended; ns since 1970."""
    events = [(event.start_ns(), event.nbytes()) for event in records.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sorted(events, key=lambda event: event[0])
