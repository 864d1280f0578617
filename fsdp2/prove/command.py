"""``fsdp2 prove train.py -- args``: run a script on its implementation and on the reference, and say whether they train the same.

    fsdp2 prove train.py --ranks 8 --steps 4 -- --config tiny.toml
    fsdp2 prove --json -m recipes.train
    fsdp2 prove --orders 16 train.py        # and in 16 orders of streams, on the pretend accelerator

The exit status is 0 if nothing is wrong as far as it looked, 1 for a fault, 2 if the script could not run.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..arguments import NATURAL, add_format, word_of
from ..errors import ArgumentError
from ..planner.api import plan_of
from ..planner.script import of_script
from ..planner.setting import Setting
from ..printable import say, say_json
from ..ranks import Rank, run_ranks
from ..run import add_cpu_run, add_script, checked_script
from ..testing import pretend
from .judging import Planned, Run, resumed, statements_of
from .on_device import device_rank
from .verdict import Verdict
from .witness import REFERENCES, Program, witness_rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cpu_run(parser, ranks=4, steps=4, timeout=30.0)
    parser.add_argument(
        "--orders", type=word_of(NATURAL), default=0, metavar="N", help="runs in other orders of streams, on the pretend accelerator"
    )
    add_format(parser)
    add_script(parser)


def run(options: argparse.Namespace) -> int:
    arguments = checked_script("prove", options)
    program = Program(options.script, tuple(arguments), options.is_module)
    try:
        found = prove(program, options.ranks, options.steps, options.orders, timeout=options.timeout, limit=options.limit)
    except KeyboardInterrupt:
        sys.stderr.write("fsdp2 prove: interrupted; its ranks have ended\n")
        return 128 + signal.SIGINT
    if options.format == "json":
        say_json(found.to_json())
    else:
        say(str(found))
    sys.stdout.flush()
    return found.status


def proves(
    step: Callable[[Any, int], object] | str | os.PathLike[str],
    model: Callable[[], nn.Module] | None = None,
    ranks: int = 4,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 4,
    orders: int = 0,
    limit: float = 600.0,
) -> Verdict:
    """For tests: prove a script, or a step of training. Raises AssertionError with the verdict unless nothing is wrong.

    step:       a script's path; or a function of a module and the number of a step, which runs forward and backward
    model:      with a step, a function that makes the model on each rank, shards it, and returns it. ``fully_shard`` must be a
                name of its module: on the reference it means another function there
    optimizer:  makes the optimizer from the parameters
    orders:     runs in other orders of streams, on the pretend accelerator
    Collective: no; this process forks the ranks. It may have no process group, and may not have used CUDA

    Example:
        def sharded():
            torch.manual_seed(0)
            return fully_shard(nn.Linear(4, 4))


        def step(model, number):
            model(torch.randn(2, 4)).square().mean().backward()


        fsdp2.testing.proves(step, sharded, ranks=2)
    """
    if not callable(step):
        program = Program(os.fspath(step))
    elif model is None:
        raise ArgumentError(
            "proves got a step without a model", expected="a function that makes it", fix="proves(step, model, ranks=2)"
        )
    else:
        program = Program(step.__name__, call=functools.partial(_train, step, model, optimizer, steps))
    found = prove(program, ranks, steps, orders, limit=limit)
    if found.verdict != "proven":
        raise AssertionError(str(found))
    return found


def _train(step: Callable[[Any, int], object], model: Callable[[], nn.Module], optimizer: Callable[[Any], Any], steps: int) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    made = model()
    steps_on = optimizer(made.parameters())
    for number in range(steps):
        step(made, number)
        steps_on.step()
        steps_on.zero_grad()


def prove(
    program: Program, num_ranks: int, num_steps: int, num_orders: int = 0, *, timeout: float = 30.0, limit: float = 600.0
) -> Verdict:
    """Run ``program`` and judge it. Collective: no; this process forks the ranks"""
    verdict = Verdict(program.script, num_ranks)
    with tempfile.TemporaryDirectory(prefix="fsdp2-prove-") as folder:
        runs: dict[str, Run] = {}

        def run_as(role: str, body: Callable[..., NoReturn], *first: Any, last: tuple[Any, ...] = (), ranks: int = num_ranks) -> None:
            where = Path(folder, role)
            where.mkdir()
            begun = time.monotonic()
            rank = functools.partial(body, *first, program, where, num_steps, *last)
            runs[role] = Run(role, where, run_ranks(ranks, rank, limit_s=limit, patience_s=timeout))
            verdict.seconds[role] = round(time.monotonic() - begun, 2)

        for role in ("real", *REFERENCES):
            if not any(_says_nothing_of_the_reference(each) for each in runs.values()):
                run_as(role, witness_rank, role, last=(Path(folder, "real"), None))
        if any(not each.get("failure", "-") for each in runs["real"].all_events()):
            for role in ("real", *REFERENCES):
                if role == "real" or (runs["resumed"].num_steps > 1 and runs["reference"].num_steps):
                    last = Path(folder, "resumed"), Path(folder, "real")
                    run_as(resumed(role), witness_rank, role, last=last, ranks=num_ranks // 2 or 2)
        no_device = _no_device(num_orders, runs["real"])
        for seed in (None, *range(num_orders)) if not no_device else ():
            if seed is None or runs["device"].is_well:
                run_as("device" if seed is None else f"order{seed}", device_rank, seed)
        is_planned = program.is_file and any(each.get("name") == "fsdp2" for each in runs["real"].all_events())
        planned = _planned(program, num_ranks, limit) if is_planned and runs["real"].is_well else None
        _judge(verdict, runs, no_device, planned)
    return verdict


def _says_nothing_of_the_reference(run: Run) -> bool:
    """It made no step, as it would not there: it has ended by itself, or before a sharded model has run."""
    return not run.num_steps and (run.role != "real" or run.is_well or not any(each["kind"] == "start" for each in run.all_events()))


def _no_device(num_orders: int, real: Run) -> str:
    """Why there is no run on the pretend accelerator, which is compiled here, once."""
    if not num_orders:
        return "--orders N runs the script on the pretend accelerator, in N orders of streams"
    if not real.is_well or not real.num_steps:
        return "the program did not run to its last step"
    if missing := pretend.missing_tools():
        return f"the pretend accelerator needs {', '.join(missing)}"
    try:
        pretend.library()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _planned(program: Program, num_ranks: int, limit: float) -> Planned | str:
    """What ``fsdp2 plan`` says that rank 0 keeps, and needs, or why it says nothing."""

    def plan(rank: Rank) -> Planned:
        workload, setting = of_script(program.script, [*program.arguments], Setting(world_size=num_ranks))
        planned = plan_of(workload, setting, None, lambda planned: False)
        return planned.state, planned.memory.peak

    (end,) = run_ranks(1, plan, limit_s=limit)
    return end.result if isinstance(end.result, tuple) else end.error or f"status {end.status}"


def _judge(verdict: Verdict, runs: Mapping[str, Run], no_device: str, planned: Planned | str | None) -> None:
    real = runs["real"]
    verdict.steps = real.num_steps
    verdict.implementation = next((each["name"] for each in real.all_events() if each["kind"] == "implementation"), "")
    if not any(run.num_steps for run in runs.values()) and not real.ranks.is_late and not real.is_refused:
        first = real.ranks.first_failed or real.ranks[0]
        why = real.why() or "no torch.optim.Optimizer has stepped"
        verdict.why_not_run = "\n".join([f"it made no step: {why}", *first.output.splitlines()[-12:]])
        return
    verdict.statements = list(statements_of(runs, no_device, planned))
    verdict.decide()
