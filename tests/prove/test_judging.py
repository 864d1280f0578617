"""What ``fsdp2 prove`` makes of what ranks have written down: quick, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp2.doctor.rank_record import RankRecord
from fsdp2.errors import LostRankError
from fsdp2.inspector.fingerprint import Fingerprint
from fsdp2.planner.memory import Peak
from fsdp2.prove.judging import Run, _of_checkpoint, _of_device, _of_peak
from fsdp2.prove.parts import Seen
from fsdp2.prove.verdict import MAX_SAID, Statement, Verdict, not_looked_at
from fsdp2.ranks import RankEnd, Ranks
from fsdp2.state_bytes import StateBytes

PLANNED = StateBytes(0, 1, 2, 3), Peak(5000, {}, "backward", "blocks.1")


def run_of(events: dict[int, list[dict[str, Any]]], num_steps: int = 3, status: int = 0) -> Run:
    run = Run("", Path(), Ranks(RankEnd(rank, status, 1.0) for rank in events))
    run.__dict__.update(records=[RankRecord(rank, num_steps=num_steps) for rank in events], events=events)
    return run


def on_device(*steps: dict[str, Any]) -> Run:
    usual = {"kind": "memory", "peak": 9000, "kept": 4000, "where": "the optimizer's step", "twice": [], "unsharded": {}}
    return run_of({rank: [usual | {"step": number} | each for number, each in enumerate(steps, 1)] for rank in range(2)})


@pytest.mark.parametrize(
    ("steps", "words", "at"),
    [
        ([{}, {"unsharded": {"blocks.1": "after the step"}}], "blocks.1 is unsharded still after the step", (2, ("blocks.1",))),
        ([{"twice": ["w", "b"]}], "another tensor has the gradient of w", (1, ("w", "b"))),
        ([{"kept": 4000}, {"kept": 5000}, {"kept": 6100}], "at least 1.00 kB more", (None, ())),
    ],
)
def test_bytes_that_are_kept_too_long_are_a_fault(steps: list[dict[str, Any]], words: str, at: tuple[Any, ...]) -> None:
    said = _of_peak(on_device(*steps), PLANNED)
    assert (said.holds, said.method, (said.step, said.names)) == (False, "measured on a stand-in", at)
    assert words in said.said


@pytest.mark.parametrize(
    "kept",
    [
        [4000, 4000, 4000],
        [4000, 5000],  # two steps: an optimizer may make its state late
        [4000, 5000, 5000],
        [4000, 4100, 4200],  # losses
    ],
)
def test_bytes_that_a_step_may_leave_are_no_fault(kept: list[int]) -> None:
    said = _of_peak(on_device(*({"kept": each} for each in kept)), PLANNED)
    assert said.holds is True
    assert "up to 9.00 kB, in the optimizer's step of step 1" in said.said
    assert "fsdp2 plan says 5.00 kB for a step of rank 0, in backward of blocks.1" in said.said


@pytest.mark.parametrize(("planned", "method"), [(PLANNED, "modeled"), ("no plan", "not looked at"), (None, "not looked at")])
def test_a_peak_that_nobody_measured_is_what_the_plan_says(planned: Any, method: str) -> None:
    *_, said = _of_device({}, "no device", planned)
    assert (said.subject, said.holds, said.method) == ("peak", None, method)


def seen(checksum: int, norm: float) -> Seen:
    return Seen(Fingerprint(checksum, norm * norm, (norm,)), 0, 1, 1e-7, 1e-7)


def after_a_load(loss: float, grad: float = 1.0, num_steps: int = 2, status: int = 0) -> Run:
    """One rank that loads ``w``, and makes another step."""
    values = {"w": seen(1, 1.0)}
    events: list[dict[str, Any]] = [
        {"kind": "loaded", "step": 1, "failure": "", "numbers": {}, "values": values},
        {"kind": "inputs", "step": 1, "digest": 7},
        {"kind": "start", "step": 1, "values": values},
        {"kind": "loss", "step": 2, "values": [loss], "eps": 1e-7},
        {"kind": "gradients", "step": 2, "optimizer": 0, "values": {"w": seen(int(100 * grad), grad)}},
    ]
    return run_of({0: events}, num_steps, status)


@pytest.mark.parametrize(
    ("resumed", "reference", "holds", "words"),
    [
        (after_a_load(2.0), after_a_load(2.0), True, "trains on for 1 step as the reference does"),
        (after_a_load(3.0), after_a_load(2.0), False, "in step 1 after that it trains otherwise"),
        (after_a_load(2.0, 0.5), after_a_load(2.0), False, "w is 0.5 times the reference's"),
        (after_a_load(2.0, status=1), after_a_load(2.0), False, "and not on the reference"),
        (after_a_load(2.0), None, True, "was not looked at: the reference was not run"),
        (after_a_load(2.0, num_steps=1), after_a_load(2.0), True, "was not looked at: it made no other step"),
    ],
)
def test_what_follows_a_load_must_be_the_references(resumed: Run, reference: Run | None, holds: bool, words: str) -> None:
    saved = {"kind": "saved", "step": 4, "failure": "", "numbers": {}, "values": {"w": seen(1, 1.0)}}
    said = _of_checkpoint(run_of({0: [saved], 1: []}), resumed, reference, reference)
    assert said.holds is holds, said
    assert words in said.said


def test_an_error_is_a_sentence_and_a_fix() -> None:
    lost = LostRankError(
        "a rank is gone", items=["rank 1 has ended", "the backend said: closed"], expected="every rank", fix="look there"
    )
    run = run_of({0: []}, status=1)
    run.records[0].status, run.records[0].failure = 1, f"fsdp2.errors.LostRankError: {lost}"
    assert "\n" not in run.why()
    assert "a rank is gone" in run.why()
    assert "rank 1 has ended" in run.why()
    assert "look there" not in run.why()


def test_ranks_that_wait_at_the_same_line_are_named_together(tmp_path: Path) -> None:
    ends = Ranks(RankEnd(rank, -15, 1.0, stack=f'File "train.py", line {20 if rank else 30}') for rank in range(64))
    ends.is_late = ends.is_stalled = True
    for rank in range(64):
        (tmp_path / f"calls-{rank}").write_text("all_reduce 3 float32 0,1 backward of layers.0\n")
    said = Run("real", tmp_path, ends).why()
    assert said == (
        "the ranks wait for each other: rank 0 is at train.py:30, after all_reduce in backward of layers.0; "
        "ranks 1-63 are at train.py:20, after all_reduce in backward of layers.0"
    )


def test_a_screen_says_once_why_nothing_was_looked_at() -> None:
    verdict = Verdict("train.py", 2)
    verdict.statements = [not_looked_at("losses", "no"), not_looked_at("plan", "never"), not_looked_at("gradients", "no")]
    verdict.statements.append(Statement("run", False, "measured", "x" * 5000))
    lines = str(verdict).splitlines()
    assert "[ -- ]  losses, gradients: no" in lines
    assert "[ -- ]  plan: never" in lines
    assert max(map(len, lines)) < MAX_SAID + 100
