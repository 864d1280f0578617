"""What ended a run is told by the next one: which rank, on which host, where the others noticed, and how much is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

import fsdp2
from fsdp2.checkpoint.end_notes import taken_note
from fsdp2.inspector.report.reading import read_run
from fsdp2.inspector.report.tables import about
from fsdp2.ranks import Rank, Ranks, run_ranks
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


def test_a_note_that_cannot_be_read_is_no_note_and_the_cause_counts_more_than_what_others_noticed(tmp_path):
    gone = "a rank is gone, or cannot be reached: the all-gather of 1 has failed"
    texts = [
        "{",
        "[]",
        "3",
        "[" * 5000,
        "[5," + " " * 10**6,
        json.dumps([5, f"{gone}; no process has ended"]),
        json.dumps([6, f"{gone}; rank 1: it has ended"]),
    ]
    for rank, text in enumerate(texts):
        (tmp_path / f"end_rank_{rank}").write_text(text)
    os.mkfifo(tmp_path / "end_rank_7")
    assert taken_note(tmp_path, 6) == f"{gone}; rank 1: it has ended; 0 steps lost"
    assert taken_note(tmp_path, 6) == ""
    (tmp_path / "end_rank_0").write_text(json.dumps([None, gone]))
    (tmp_path / "end_rank_1").write_text(json.dumps([None, "rank 1 on n0: ValueError: \x1b[2J"]))
    assert taken_note(tmp_path, 0) == "rank 1 on n0: ValueError: \\x1b[2J"
