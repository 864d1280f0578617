"""A trace's events, against what the model's layers must have done; and clocks, against offsets that the test has put between them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

import fsdp2
from fsdp2.core.comm import collective_log
from fsdp2.inspector.clock import measure, offset_from
from harness import on_ranks
from harness.inspected import folder_for_all, training
from harness.memory import PeakBytes

Events = list[dict[str, Any]]
LAYERS = {"0", "1", "2"}


def traced(**options: Any) -> Events:
    _, _, step = training()
    step()
    folder = folder_for_all()
    with fsdp2.trace(folder, **options):
        step()
    dist.barrier()  # rank 0 has merged
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def of(events: Events, rank: int, **wanted: Any) -> Events:
    return [each for each in events if each["pid"] == rank and all(each.get(key) == value for key, value in wanted.items())]


def end(span: dict[str, Any]) -> float:
    return span["ts"] + span["dur"]


@on_ranks(2)
def test_a_trace_has_the_modules_and_waits_of_all_ranks_in_their_phases(world_size):
    events = traced(allocations=False)
    assert collective_log.current is None
    for rank in range(world_size):
        phases = {each["name"]: each for each in of(events, rank, ph="X", tid=1)}
        assert list(phases) == ["forward", "backward", "optimizer"]
        row = sorted(of(events, rank, ph="X", tid=2), key=lambda each: each["ts"])
        assert all(end(first) <= second["ts"] + 0.01 for first, second in itertools.pairwise(row))  # one after another
        for kind in ("forward", "backward"):
            units = [each for each in row if each["cat"] == kind]
            assert {each["args"]["unit"] for each in units} >= LAYERS
            assert all(phases[kind]["ts"] <= each["ts"] and end(each) <= end(phases[kind]) for each in units)
        assert {each["name"] for each in row if each["cat"] == "wait"} >= {f"wait for all-gather of {layer}" for layer in LAYERS}


@on_ranks(2)
def test_a_trace_has_each_collective_as_a_range_from_its_issue_to_its_end(world_size):
    events = traced(allocations=False)
    for rank in range(world_size):
        begun = {each["id"]: each for each in of(events, rank, ph="b")}
        ended = {each["id"]: each for each in of(events, rank, ph="e")}
        assert begun.keys() == ended.keys()
        assert all(each["ts"] <= ended[key]["ts"] for key, each in begun.items())
        counts = Counter((each["cat"], each["args"]["phase"], each["args"]["unit"]) for each in begun.values())
        for layer in LAYERS:
            assert counts["all-gather", "forward", layer] == counts["all-gather", "backward", layer] == 1
            assert counts["reduce-scatter", "backward", layer] == 1


@on_ranks(2)
def test_the_most_that_a_trace_sees_allocated_is_what_is_alive(world_size):
    gc.collect()  # models of other tests, which a trace counts as well
    _, _, step = training(width=256, rows=4096)
    with PeakBytes() as live:
        step()
        live.reset()
        step()
    folder = folder_for_all()
    with fsdp2.trace(folder):
        step()
    dist.barrier()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    most = max(each["args"].get("allocated", 0) for each in of(events, dist.get_rank(), ph="C"))
    assert most == pytest.approx(live.peak, rel=0.05)


@on_ranks(2)
def test_ranks_that_an_exception_takes_out_of_a_trace_leave_their_own_files(world_size):
    _, _, step = training()
    folder = folder_for_all()
    with contextlib.suppress(KeyError), fsdp2.trace(folder):
        step()
        raise KeyError
    assert json.loads((folder / f"trace.rank{dist.get_rank()}.json").read_text())["traceEvents"]
    assert not (folder / "trace.json").exists()


def test_clocks_are_as_far_apart_as_the_stamps_of_collectives_say():
    own, first = [(1000, 1030), (1100, 1108)], [(0, 25), (102, 107)]
    offset = offset_from(own, first)  # at least 1000 - 25 and 1100 - 107, at most 1030 - 0 and 1108 - 102
    assert (offset.ahead, offset.uncertainty) == (999, 6)


@on_ranks(2)
def test_ranks_of_one_host_have_one_clock(world_size):
    assert measure().ahead == 0
