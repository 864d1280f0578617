"""Ranks and hosts lost at random moments: a run goes on bit for bit from the last step that was acknowledged, or says why not.

    PYTHONPATH=tests python tests/checkpoint/test_random_kills.py --kills 100

Four ranks on two hosts, forks of this process, keep every step in memory and save every fifth on disk. One of them kills itself at the
n-th call or return of any function, in any thread, of the load or of the steps after it; n is drawn. Each second time its host's
memory is lost as well, if a step was kept since another's was. Then all ranks start again, and are killed again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.ranks import Rank, RankEnd, run_ranks
from harness.runs import Run

RANKS, RANKS_PER_HOST, STEPS_A_START = 4, 2, 6


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_run_killed_at_random_moments_goes_on_bit_for_bit_or_says_why_it_goes_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert kill_and_restart(tmp_path, shape, kills=4, draw=random.Random(1))["killed"] == 4


def kill_and_restart(folder: Path, shape: tuple[int, ...], kills: int, draw: random.Random) -> Counter[str]:
    """Returns how often a rank was killed, and where the starts after that found the newest checkpoint."""
    expected = [dict(losses(end)) for end in started(folder / "undisturbed", shape, (kills + 2) * STEPS_A_START)]
    counts, acknowledged, lost_after = Counter[str](), 0, 0
    num_calls = {"load": 1_000_000, "steps": 3_000_000}  # until a start that was not killed has counted
    for start in itertools.count():
        phase = draw.choice(["load", "steps", "steps"])
        kill = phase, draw.randrange(RANKS), draw.randrange(num_calls[phase])
        is_last = counts["killed"] == kills or start == 3 * kills
        ends = started(folder / "run", shape, STEPS_A_START, *([] if is_last else kill))
        for end, of_rank in zip(ends, expected, strict=True):
            assert all(of_rank[step] == loss for step, loss in losses(end)), f"start {start}, rank {end.rank}, {kill}"
        resumed = {value[1:3] for end in ends for value in end.sent if value[0] == "resumed"}
        why = [value[3] for end in ends for value in end.sent if value[0] == "resumed" and value[3]]
        assert len(resumed) <= 1
        for step, source in resumed:
            assert step >= acknowledged or why, f"start {start} went back from step {acknowledged} to {step} of {source}"
            counts[source if step >= acknowledged else "went back, and said why"] += 1
            acknowledged = step
        acknowledged = max([acknowledged, *(value[1] for end in ends for value in end.sent if value[0] == "acknowledged")])
        if is_last:
            assert not any(end.status for end in ends), [end.output for end in ends]
            return counts
        victim = ends[kill[1]]
        if victim.status == -signal.SIGKILL:
            counts["killed"] += 1
            if acknowledged > lost_after and counts["killed"] % 2 == 0:  # where both lose it at once, nothing is left that could tell
                lost_after = acknowledged
                counts["memory of a host was lost"] += 1
                shutil.rmtree(folder / "run" / f"host_{victim.rank // RANKS_PER_HOST}", ignore_errors=True)
        num_calls |= {value[1]: value[2] for value in victim.sent if value[0] == "calls" and resumed}
    raise AssertionError("it has no end")


def losses(end: RankEnd) -> Iterator[tuple[int, str]]:
    return ((value[1], value[2]) for value in end.sent if value[0] == "loss")


def started(folder: Path, shape: tuple[int, ...], num_steps: int, phase: str = "", victim: int = -1, moment: int = 0) -> Any:
    """victim: kills itself at that moment of a phase"""

    def body(rank: Rank) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard",) if len(shape) == 1 else ("replicate", "shard"))
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        def begins(name: str) -> None:
            sys.setprofile(None)
            threading.setprofile(None)
            if name and (name, rank.rank) == (phase, victim):
                threading.setprofile(count)
                sys.setprofile(count)
            elif calls:
                rank.send(("calls", phase, calls))

        run = Run(folder / "disk", mesh=mesh, memory=folder / f"host_{rank.rank // RANKS_PER_HOST}")
        with run.checkpointer as checkpointer, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            first = 0
            begins("load")
            if checkpointer.latest():
                resumed = checkpointer.load()
                first = resumed.step
                why = [str(each.message) for each in found if "kept in memory" in str(each.message)]
                rank.send(("resumed", first, resumed.source, why))
            begins("steps")
            for step in range(first + 1, first + 1 + num_steps):
                rank.send(("loss", step, run.step().hex()))
                (checkpointer.keep if step % 5 else checkpointer.save)(step)
                rank.send(("acknowledged", step - 1 if step > first + 1 else first))  # a save waits for the one before
                if step % 3 == 0:
                    checkpointer.wait()
                    rank.send(("acknowledged", step))
        begins("")

    return run_ranks(RANKS, body, limit_s=300, grace_s=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for shape in ((4,), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            print(shape, dict(kill_and_restart(Path(folder), shape, options.kills // 2, random.Random(options.seed))), flush=True)


if __name__ == "__main__":
    main()
