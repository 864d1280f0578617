"""Run many programs, and make those that fail small: ``python tests/fuzz SEEDS`` (from the checkout, or by ``make fuzz``).

    python tests/fuzz 0:1000                   # seeds 0 to 999, failures shrunk and printed
    python tests/fuzz 0:10000 --log runs.jsonl # one JSON line a seed; a seed that is in the file already is not run again
    python tests/fuzz 17 --lib torch           # the same program on torch's FSDP2, as a control
    python tests/fuzz 17 --show                # print it

A line is {"seed", "result", "headline", "seconds", "program" (shrunk), "text"}; the exit status is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    # ``python tests/fuzz`` puts tests/fuzz into sys.path; its modules are known as fuzz.*, and harness lies beside it.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from fuzz.body import Result, run
from fuzz.drawing import draw
from fuzz.program import Program
from fuzz.shrinking import shrink
from harness.pool import kill_pools


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("seeds", help="first:last (last is not run), or one seed")
    parser.add_argument("--log", type=Path, help="a file to append results to, and to resume from")
    parser.add_argument("--lib", choices=["fsdp2", "torch"], default="fsdp2")
    parser.add_argument("--shrink", type=float, default=60, metavar="SECONDS", help="at most for each failure; 0: leave it as it is")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time; go on with --log")
    parser.add_argument("--show", action="store_true", help="print the programs and run nothing")
    options = parser.parse_args()
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    if options.show:
        for seed in seeds:
            print(draw(seed))
        return 0
    done = _done(options.log)
    counts: collections.Counter[str] = collections.Counter(entry["result"] for seed, entry in done.items() if seed in seeds)
    end = time.monotonic() + options.minutes * 60
    for seed in seeds:
        if seed in done:
            continue
        if time.monotonic() > end:
            break
        began = time.monotonic()
        program = draw(seed)
        result = run(program, options.lib)
        counts[result.kind] += 1
        entry = {"seed": seed, "result": result.kind, "seconds": round(time.monotonic() - began, 3)}
        if result.kind != "right":
            entry |= {"headline": result.headline, "program": repr(program)}
        if result.kind == "fault":
            small, result = _smallest(program, result, options.lib, options.shrink)
            entry |= {"headline": result.headline, "text": result.text[-4000:], "shrunk": repr(small)}
            print(f"seed {seed}: {result.headline}\n  {small}", flush=True)
        if options.log is not None:
            with options.log.open("a") as log:
                log.write(json.dumps(entry) + "\n")
    kill_pools()
    print(f"seeds {options.seeds}: {dict(counts)}")
    return 1 if counts["fault"] else 0


def _done(log: Path | None) -> dict[int, dict[str, object]]:
    if log is None or not log.exists():
        return {}
    return {entry["seed"]: entry for entry in map(json.loads, log.read_text().splitlines())}


def kind_of(result: Result) -> str:
    """What stays the same while a failure is made smaller: the headline without names and numbers."""
    return re.sub(r"[\d.]+|of [a-z0-9._]+", "#", result.headline)[:60]


def _smallest(program: Program, result: Result, lib: str, seconds: float) -> tuple[Program, Result]:
    kind = kind_of(result)
    latest = [result]

    def fails(candidate: Program) -> bool:
        # A hang takes its whole time limit to be seen: candidates get a shorter one.
        found = run(candidate, lib, timeout_s=5.0)
        if found.kind == "fault" and kind_of(found) == kind:
            latest[0] = found
            return True
        return False

    return shrink(program, fails, seconds), latest[0]


if __name__ == "__main__":
    sys.exit(main())
