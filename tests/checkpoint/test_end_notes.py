"""What ended a run is told by the next one: which rank, on which host, where the others noticed, and how much is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fsdp2
from fsdp2 import ArgumentError
from fsdp2.checkpoint import Checkpointer
from fsdp2.checkpoint.end_notes import EndNotes
from fsdp2.inspector.report.reading import read_run
from fsdp2.inspector.report.tables import about
from fsdp2.ranks import Rank, Ranks, run_ranks
from harness import on_ranks
from harness.runs import Run


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed() -> None:
    raise ValueError("bad sample")


def started(folder: Path, num_steps: int, end) -> Ranks:
    """Two ranks save step 2 and keep step 4; rank 1 ends so before its last step."""

    def body(rank: Rank) -> None:
        dist.init_process_group("gloo")
        run = Run(folder / "checkpoints", memory=folder / "memory")
        with run.checkpointer as checkpointer:
            resumed = checkpointer.load() if checkpointer.latest() else None
            first = resumed.step if resumed else 0
            rank.send(("lost", resumed.lost if resumed else None))
            with fsdp2.ledger(folder / "records", run.model, run.optimizer, first_step=first + 1, resumed=resumed):
                for step in range(first + 1, num_steps + 1):
                    if end is not None and step == num_steps and rank.rank == 1:
                        end()
                    run.step()
                    if step == 2:
                        checkpointer.save(step)
                    if step == 4:
                        checkpointer.keep(step)
                        checkpointer.wait()
        dist.destroy_process_group()

    return run_ranks(2, body, limit_s=240)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (
            killed,
            r"a rank is gone, or cannot be reached: the .* has failed; rank 1: its process \(\d+ on \S+\) has ended; 2 steps",
        ),
        (failed, r"rank 1 on \S+: ValueError: bad sample; 2 steps lost"),
    ],
)
def test_the_next_run_tells_which_rank_has_ended_the_one_before_and_what_is_lost(tmp_path, end, why):
    ranks = started(tmp_path, 7, end)
    assert ranks.status != 0
    ranks = started(tmp_path, 7, None)
    told = [value[1] for rank in range(2) for value in ranks[rank].sent]
    assert told[1] == ""
    assert re.search(why, told[0]), told[0]
    run = read_run(tmp_path / "records")
    assert run.run["resumed"] == {"step": 4, "source": "memory", "lost": told[0]}
    assert f"Goes on after step 4 from memory. {told[0]}" in about(run)
    assert not list((tmp_path / "checkpoints").glob("end_rank_*"))


def notes_in(folder: Path) -> EndNotes:
    with patch.object(dist, "get_rank", return_value=0):
        return EndNotes(folder, None)


def test_a_note_that_cannot_be_read_is_no_note_and_the_cause_counts_more_than_what_others_noticed(tmp_path):
    gone = "a rank is gone, or cannot be reached: the all-gather of 1 has failed"
    texts = [
        "{",
        "[]",
        "3",
        "[" * 5000,
        "[5," + " " * 10**6,
        '[Infinity, "x"]',
        json.dumps([5, f"{gone}; no process has ended"]),
        json.dumps([6, f"{gone}; rank 1: it has ended"]),
    ]
    for rank, text in enumerate(texts):
        (tmp_path / f"end_rank_{rank}").write_text(text)
    os.mkfifo(tmp_path / "end_rank_8")
    notes = notes_in(tmp_path)
    assert notes.take(6) == f"{gone}; rank 1: it has ended; 0 steps lost"
    assert notes.take(6) == ""
    (tmp_path / "end_rank_0").write_text(json.dumps([None, gone]))
    (tmp_path / "end_rank_1").write_text(json.dumps([None, "rank 1 on n0: ValueError: \x1b[2J"]))
    assert notes.take(0) == "rank 1 on n0: ValueError: \\x1b[2J"


def test_what_a_note_says_is_the_error_as_it_was(tmp_path):
    for error, said in (
        (ValueError("expected: 3 columns, got 4"), "ValueError: expected: 3 columns, got 4"),
        (ArgumentError("bad", expected="good", fix="change it"), "ArgumentError: "),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ):
        notes = notes_in(tmp_path)
        notes.leave(error)  # neither saved nor loaded: nobody goes on from there
        assert notes.take(1) == ""
        notes.at = 3
        notes.leave(SystemExit(0))
        assert notes.take(1) == ""
        notes.leave(error)
        assert said in notes.take(1)
    notes.leave(ValueError("\U0001f600" * 1000))
    assert "\U0001f600" in notes.take(1)


@on_ranks(2)
def test_notes_are_taken_by_the_run_that_goes_on_alone_and_never_hide_its_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    run.checkpointer.save(1)
    run.checkpointer.wait()
    with pytest.raises(ValueError, match="the real error"), run.checkpointer:
        raise ValueError("the real error")
    with Checkpointer(tmp_path, run.model) as evaluation:
        assert evaluation.load().lost == ""
    again = Run(tmp_path)
    assert ("the real error; 0 steps lost" in again.checkpointer.load().lost) == (dist.get_rank() == 0)
    with pytest.raises(ValueError, match="another"), again.checkpointer:
        raise ValueError("another")
    later = Run(tmp_path)
    later.checkpointer.save(2)  # from the start
    later.checkpointer.wait()
    assert later.checkpointer.load().lost == ""
    later.checkpointer.close()
    assert not list(tmp_path.glob("end_rank_*"))
    dist.barrier()


@on_ranks(2)
def test_what_wraps_an_optimizer_without_its_hooks_saves_and_tells_no_number_of_steps(tmp_path: Path) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_optimizer_step"):
                raise AttributeError(name)
            return getattr(self.__dict__["optimizer"], name)

    run = Run(tmp_path)
    run.step()
    checkpointer = Checkpointer(tmp_path, run.model, Wrapper(run.optimizer))
    checkpointer.save(1)
    checkpointer.wait()
    with pytest.raises(ValueError, match="bad"), checkpointer:
        raise ValueError("bad")
    run.checkpointer.close()
    dist.barrier()
    assert json.loads((tmp_path / f"end_rank_{dist.get_rank()}").read_text())[0] is None
