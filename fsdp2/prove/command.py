"""``fsdp2 prove train.py -- args``: run a script on its implementation and on the reference, and say whether they train alike.

    fsdp2 prove --ranks 8 --steps 4 train.py -- --config tiny.toml
    fsdp2 prove --json -m recipes.train

The exit status is 0 if nothing is wrong as far as it looked, 1 for a fault, 2 if the script could not run.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path

from ..arguments import COUNT, POSITIVE, word_of
from ..doctor.command import _is_there
from ..errors import ArgumentError
from ..printable import say_json
from ..ranks import run_ranks
from ..run import add_script
from .judging import Run, statements_of
from .verdict import Verdict
from .witness import REFERENCES, Program, witness_rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=word_of(COUNT), default=4, metavar="N", help="processes on this machine (default: 4)")
    parser.add_argument("--steps", type=word_of(COUNT), default=4, metavar="N", help="optimizer steps (default: 4)")
    parser.add_argument(
        "--timeout",
        type=word_of(POSITIVE, float),
        default=30.0,
        metavar="S",
        help="seconds in which no rank computes anything, after which the ranks hang (default: 30)",
    )
    parser.add_argument(
        "--limit", type=word_of(POSITIVE, float), default=600.0, metavar="S", help="seconds that one run may take (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/prove.md)")
    add_script(parser)


def run(options: argparse.Namespace) -> int:
    if not _is_there(options.script, options.is_module):
        raise ArgumentError(
            f"prove found no {options.script!r}",
            expected="a Python file, or -m and a module",
            fix="for instance: fsdp2 prove --ranks 4 train.py -- --lr 0.1",
        )
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    program = Program(options.script, tuple(arguments), options.is_module)
    found = prove(program, options.ranks, options.steps, timeout=options.timeout, limit=options.limit)
    if options.json:
        say_json(found.to_json())
    else:
        found.show()
    sys.stdout.flush()
    return found.status


def prove(program: Program, num_ranks: int, num_steps: int, *, timeout: float = 30.0, limit: float = 600.0) -> Verdict:
    """Run ``program`` and judge it. Collective: no; this process forks the ranks"""
    verdict = Verdict(program.script, num_ranks)
    with tempfile.TemporaryDirectory(prefix="fsdp2-prove-") as folder:
        runs: dict[str, Run] = {}
        for role in ("real", *REFERENCES):
            where = Path(folder, role)
            where.mkdir()
            begun = time.monotonic()
            witness = functools.partial(witness_rank, role, program, where, num_steps, Path(folder, "real"))
            runs[role] = Run(role, where, run_ranks(num_ranks, witness, limit_s=limit, patience_s=timeout))
            verdict.seconds[role] = round(time.monotonic() - begun, 2)
        _judge(verdict, runs)
    return verdict


def _judge(verdict: Verdict, runs: dict[str, Run]) -> None:
    real, reference = runs["real"], runs["reference"]
    verdict.steps = real.num_steps
    verdict.implementation = next((each["name"] for each in real.all_events() if each["kind"] == "implementation"), "")
    if not real.num_steps and not reference.num_steps and not real.ranks.is_late:
        first = real.ranks.first_failed or real.ranks[0]
        why = real.why() or "no torch.optim.Optimizer has stepped"
        verdict.why_not_run = "\n".join([f"it made no step: {why}", *first.output.splitlines()[-12:]])
        return
    verdict.statements = list(statements_of(real, reference, runs["reference64"]))
    verdict.decide()
