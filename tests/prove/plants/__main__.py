"""Run plants, or healthy programs, under ``fsdp2 prove``: a line for each, and a JSON object with the totals.

PYTHONPATH=.:tests/prove python -m plants user library healthy torchs     torchs: users' faults and healthy programs, on torch's FSDP2
PYTHONPATH=.:tests/prove python -m plants user --only "zero_grad is forgotten"
PYTHONPATH=.:tests/prove python -m plants user --part 2/6      the third of six parts
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fsdp2.prove.command import prove
from fsdp2.prove.witness import Program
from plants.healthy import HEALTHY
from plants.library import LIBRARY_PLANTS
from plants.user_programs import USER_PLANTS, Plant

# torch divides by a factor with an operation that gloo lacks.
TORCHS = [
    dataclasses.replace(each, module="torch.distributed.fsdp")
    for each in (*USER_PLANTS, *HEALTHY)
    if not each.name.endswith(".py")
    and "divide_factor" not in each.script
    and "import fsdp2" not in each.script
    and "from fsdp2." not in each.script
]
TABLES = {"user": USER_PLANTS, "library": LIBRARY_PLANTS, "healthy": HEALTHY, "torchs": TORCHS}
NUM_STEPS = 3
ROOT = Path(__file__).parents[3]


def outcome_of(plant: Plant, orders: int) -> dict[str, Any]:
    """named: found, and the verdict has all words; a healthy program is proven, also against the reference in fp64"""
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / plant.name if plant.name.endswith(".py") else Path(folder, "train.py")
        if script.parent == Path(folder):
            script.write_text(plant.script)
        begun = time.monotonic()
        verdict = prove(Program(str(script)), plant.ranks, NUM_STEPS, orders, timeout=20.0, limit=240.0)
    said = json.dumps([dataclasses.asdict(each) for each in verdict.faults])
    is_found = verdict.verdict == "fault"
    is_bounded = not any("did not run in fp64" in each.said for each in verdict.statements)
    is_named = all(word in said for word in plant.words.split()) if plant.words else verdict.verdict == "proven" and is_bounded
    return {
        "name": plant.name,
        "found": is_found,
        "named": is_named and is_found == bool(plant.words),
        "words": plant.words,
        "verdict": [f"{each.check or each.subject}: {', '.join(each.names[:4])}: {each.said[:300]}" for each in verdict.faults],
        "why": verdict.why_not_run,
        "not looked at": {each.subject: each.said for each in verdict.statements if each.method == "not looked at"},
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m plants")
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--only", action="append", default=[], help="names of plants")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th plant, from the K-th on")
    parser.add_argument("--orders", type=int, default=0, help="orders of streams, on the pretend accelerator")
    options = parser.parse_args()
    first, of = map(int, options.part.split("/"))
    chosen = [plant for table in options.tables for plant in TABLES[table] if not options.only or plant.name in options.only]
    outcomes = []
    for plant in chosen[first::of]:
        outcome = outcome_of(plant, options.orders)
        outcomes.append(outcome)
        mark = "named" if outcome["named"] else "found" if outcome["found"] else "missed" if plant.words else outcome["why"] or "proven"
        sys.stderr.write(f"{mark:8} {outcome['seconds']:5.1f} s  {plant.name}\n")
        sys.stderr.write("" if outcome["named"] else f"    {outcome}\n")
        sys.stderr.flush()
    json.dump(outcomes, sys.stdout)
    return int(not all(each["named"] for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
