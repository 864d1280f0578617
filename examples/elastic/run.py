"""Kills ranks of ``train.py`` at random moments, and compares every loss with those of a run that nobody disturbed.

python examples/elastic/run.py --seconds 120
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")


@dataclass
class Watched:
    """What a run has printed, and what was done to it.

    losses:  the texts printed for each step; more than one where a step was done again
    lost:    for each kill, the steps that had to be done again
    sources: of the checkpoints that it went on from
    """

    losses: dict[int, set[str]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def watched_run(options: argparse.Namespace, seconds: float, draw: random.Random) -> Watched:
    """Run ``train.py`` to its end; for ``seconds`` (and at most ``options.kills`` times) kill one rank at random moments."""
    found, kills, last = Watched(), 0, 0
    processes: dict[int, int] = {}
    started = time.monotonic()
    steps_left = draw.randint(0, 10)
    with tempfile.TemporaryDirectory() as folder:
        for line in _lines(options, folder, 1000 if seconds else 0):
            if match := re.search(r"rank (\d+) is process (\d+)", line):
                processes[int(match[1])] = int(match[2])
            elif match := re.search(r"goes on after step (\d+) from (\w+)", line):
                found.lost.append(last - int(match[1]))
                found.sources.append(match[2])
            elif match := re.search(r"step (\d+): loss (\S+)", line):
                last = int(match[1])
                found.losses.setdefault(last, set()).add(match[2])
                steps_left -= 1
                if steps_left < 0 and processes and kills < options.kills and time.monotonic() - started < seconds:
                    time.sleep(draw.uniform(0, 0.05))  # at any moment of a step
                    victim = draw.choice(sorted(processes))
                    os.kill(processes[victim], signal.SIGKILL)
                    processes.clear()  # those that torchrun starts next print theirs
                    kills, steps_left = kills + 1, draw.randint(0, 10)
                    print(f"  killed rank {victim} after step {last}", flush=True)
    return found


def _lines(options: argparse.Namespace, folder: str, restarts: int) -> Iterator[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command += ["--max-restarts", str(restarts), str(TRAIN), "--folder", folder, "--steps", str(options.steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        yield from run.stdout
    if run.returncode != 0:
        raise SystemExit(f"torchrun ended with status {run.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=120, help="how long ranks are killed")
    parser.add_argument("--kills", type=int, default=1000, help="how often at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    undisturbed = watched_run(options, 0, random.Random(options.seed))
    disturbed = watched_run(options, options.seconds, random.Random(options.seed))
    differ = sorted(step for step in undisturbed.losses if disturbed.losses.get(step) != undisturbed.losses[step])
    lost, memory = disturbed.lost, disturbed.sources.count("memory")
    print(f"{len(lost)} kills; went on from memory {memory} times; steps done again: {sum(lost)}, at most {max(lost, default=0)}")
    same = f"different at steps {differ}" if differ else "the same, to the last digit"
    print(f"losses of {len(undisturbed.losses)} steps: {same}")
    return 1 if differ or not lost else 0


if __name__ == "__main__":
    sys.exit(main())
