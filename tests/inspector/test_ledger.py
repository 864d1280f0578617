"""The ledger's lines, against what the model's sizes say must have been communicated and kept."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import doctor
from fsdp2.arguments import COUNT
from fsdp2.core.comm import collective_log
from fsdp2.errors import ArgumentError, DoctorWarning, OrderError
from fsdp2.inspect import events
from fsdp2.inspector.expected import LEDGER_LINE
from fsdp2.inspector.meter import Meter
from fsdp2.inspector.report.reading import read_run
from fsdp2.inspector.report.tables import slow_ranks, waited_for
from fsdp2.inspector.run_folder import Lines, rank_files, read_lines
from fsdp2.testing import pretend
from harness import on_ranks
from harness.inspected import folder_for_all, training

WIDTH = 64
GROUP_NBYTES = WIDTH * WIDTH * 4


def lines_of_a_run(world_size: int, **options: Any) -> list[dict[str, Any]]:
    model, optimizer, step = training(WIDTH)
    folder = folder_for_all()
    with fsdp2.ledger(folder, model, optimizer, **options):
        for _ in range(3):
            step()
        ((_, path),) = [each for each in rank_files(folder, "ledger", "jsonl") if each[0] == dist.get_rank()]
        assert len(read_lines(path, LEDGER_LINE)) == 3  # each is there when its step has ended: a crash leaves it
    dist.barrier()
    assert [rank for rank, _ in rank_files(folder, "ledger", "jsonl")] == list(range(world_size))
    return read_lines(path, LEDGER_LINE)


@on_ranks(2)
def test_each_step_has_a_line_of_what_was_communicated_and_kept(world_size):
    lines = lines_of_a_run(world_size, tokens=lambda: 128)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines[1:]:
        forward, backward = (line["communication"][phase] for phase in ("forward", "backward"))
        assert forward["all-gather"]["calls"] == backward["all-gather"]["calls"] == 3
        assert forward["all-gather"]["nbytes"] == 3 * GROUP_NBYTES
        assert forward["all-gather"]["sent"] == 3 * GROUP_NBYTES // 2
        assert backward["reduce-scatter"]["calls"] == 3
        assert backward["reduce-scatter"]["nbytes"] >= 3 * GROUP_NBYTES  # and a flag for each parameter
        assert "reduce-scatter" not in forward
        assert 0 < line["exposed_ms"] < line["duration_ms"]
        assert 0 < line["hooks_ms"] < line["duration_ms"]
        assert line["tokens"] == 128
        memory = line["memory"]
        assert memory["sharded parameters"] == 3 * GROUP_NBYTES // 2
        assert memory["optimizer state"] == 2 * memory["sharded parameters"]
        assert memory["sharded gradients"] >= memory["sharded parameters"]
        assert memory["unsharded parameters"] == GROUP_NBYTES  # the next one is packed while this one runs
        assert memory["all-gather buffers"] == GROUP_NBYTES
        assert memory["reduction buffers"] >= GROUP_NBYTES


@on_ranks(2)
def test_nothing_listens_behind_a_ledger_whoever_leaves_first(world_size):
    model, optimizer, step = training(WIDTH)
    ledger = fsdp2.ledger(folder_for_all(), model, optimizer)
    with fsdp2.watchdog(timeout=600):
        assert collective_log.current is not None
        watched = collective_log.current
        step()
        ledger.stop()
        ledger.stop()
        assert collective_log.current is watched
        assert watched.records
    assert collective_log.current is None
    assert events.listeners == ()


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ArgumentError, match="a folder"):
        fsdp2.ledger(tmp_path / "run", nn.Linear(2, 2))


WRITES_BESIDE = """
import sys
from pathlib import Path
from fsdp2.inspector.run_folder import Lines
Lines(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["ledger", "record"])
@on_ranks(2)
def test_a_second_one_in_the_same_folder_is_refused_while_the_first_writes(kind):
    """The second removed the file of the first, whose lines were lost."""
    model, optimizer, step = training(WIDTH)
    begin = functools.partial(getattr(fsdp2, kind), folder_for_all(), model, optimizer)
    with begin() as first:
        path = first.folder / f"{kind}.rank{dist.get_rank()}.jsonl"
        with pytest.raises(OrderError, match=f"being written by another {kind}"):
            begin()
        beside = subprocess.run([sys.executable, "-c", WRITES_BESIDE, path], capture_output=True, text=True)
        assert f"being written by another {kind}" in beside.stderr
        step()
    assert len(path.read_text().splitlines()) == 1
    begin().stop()  # an earlier run's lines are dropped


def test_of_a_line_that_was_cut_off_nothing_is_read(tmp_path):
    lines = Lines(tmp_path / "lines.jsonl")
    lines.write({"step": 1})
    lines.close()
    with (tmp_path / "lines.jsonl").open("a") as file:
        file.write('{"step":')
    assert read_lines(tmp_path / "lines.jsonl", {"step": COUNT}) == [{"step": 1}]


def test_the_meter_tells_waiting_from_the_time_of_hooks():
    now = [0.0]
    meter = Meter(clock=lambda: now[0])
    record = events.Record(1, "world", "all-gather", "layers.0", "forward", 1, 250, "float32")

    def at(ms: float, told: Any, *args: Any) -> None:
        now[0] = ms
        told(*args)

    at(0, meter.begins, "forward", "layers.0")
    at(0.5, meter.issued, record, object(), 2)
    at(1, meter.waits, record)
    at(3, meter.done, record)
    at(4, meter.resumes)
    counts = meter.take()
    tally = counts.tallies["forward", "all-gather"]
    assert (tally.calls, tally.nbytes, tally.sent, tally.exposed, counts.hooks) == (1, 1000, 500, 2, 2)
    assert meter.take().tallies == {}


def test_the_meter_knows_how_long_each_unit_computes_and_leaves_waits_out():
    now = [0.0]
    meter = Meter(clock=lambda: now[0])
    record = events.Record(1, "world", "all-reduce", "", "between", 1, 1, "float32")
    for ms, told, *args in (
        (0, meter.begins, "forward", "root"),
        (1, meter.resumes),
        (3, meter.begins, "forward", "0"),  # 2 ms of the root, and then 1 of a hook
        (4, meter.resumes),
        (9, meter.ends, "forward", "0"),
        (10, meter.resumes),
        (14, meter.ends, "forward", "root"),
        (15, meter.resumes),
        (15, meter.leaves),
        (18, meter.waits, record),  # outside of a hook, as of a norm
        (38, meter.done, record),
        (39, meter.begins, "backward", "0"),
        (40, meter.resumes),
        (47, meter.ends, "backward", ""),
        (48, meter.leaves),
    ):
        now[0] = ms
        told(*args)
    now[0] = 50
    counts = meter.take()
    assert counts.computing == {("forward", "root"): 6, ("forward", "0"): 5, ("between", ""): 3 + 1 + 2, ("backward", "0"): 7}
    assert sum(counts.computing.values()) + counts.hooks + counts.exposed == 50
    now[0] = 51
    assert meter.take().computing == {("between", ""): 1}


class _MayWork(nn.Linear):
    """Rank 1 does more in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = torch.ones(300, 300)
        for _ in range(100 if dist.get_rank() == 1 else 0):
            more = more @ more / 300
        return super().forward(x * more[0, 0])


@on_ranks(2)
def test_the_report_names_the_rank_and_the_unit_that_others_wait_for():
    model = nn.Sequential(nn.Linear(64, 64), _MayWork(64, 64), nn.Linear(64, 64))
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    optimizer, folder = torch.optim.SGD(model.parameters(), lr=0.1), folder_for_all()
    with fsdp2.ledger(folder, model, optimizer):
        for _ in range(7):
            model(torch.ones(2, 64)).sum().backward()
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    dist.barrier()
    run = read_run(folder)
    phase, unit, rank, ms, median = waited_for(run)[0]
    assert (phase, unit, rank) == ("forward", "1", 1)
    assert ms > 3 * median
    [slow] = slow_ranks(run)
    assert slow.startswith("rank 1 with ")
    assert slow.endswith(", most of it in forward of 1")


@on_ranks(2, device="pretend")
def test_on_a_device_units_are_timed_by_events_that_the_host_does_not_wait_for():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))).to("pretend")
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    optimizer, folder = torch.optim.SGD(model.parameters(), lr=0.1), folder_for_all()
    x = torch.ones(2, 8).to("pretend")
    with fsdp2.ledger(folder, model, optimizer):
        for index in range(3):
            with pretend.no_host_waits() if index > 0 else contextlib.nullcontext():
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            pretend.synchronize()  # what the line of the next step tells
    lines = read_lines(folder / f"ledger.rank{dist.get_rank()}.jsonl", LEDGER_LINE)
    assert lines[0]["computing_ms"] == {}  # the device had not come to the end of the step
    for line in lines[1:]:
        assert {phase: set(units) for phase, units in line["computing_ms"].items()} == {
            "forward": {"the root", "0", "1"},
            "backward": {"the root", "0", "1"},
            "between": {""},
        }


@on_ranks(1)
def test_the_run_has_what_a_check_and_a_watch_found():
    model, optimizer, _ = training(WIDTH)
    checked = doctor.check(model, torch.optim.SGD(model[1:].parameters(), lr=0.1))
    folder = folder_for_all()
    watching = doctor.watch(model, optimizer)
    with fsdp2.ledger(folder, model, optimizer, findings=[checked, watching]):
        optimizer.step()  # and no backward
        with pytest.warns(DoctorWarning, match="gradient-never-came"):
            watching.stop()
    found = [each["check"] for each in json.loads((folder / "run.json").read_text())["findings"]]
    assert found == ["optimizer-misses-parameters", "gradient-never-came"]
