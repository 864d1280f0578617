"""Run a program on the ranks of the pool, and say in one word what came of it.

``right``      every rank saw what the unsharded model says
``refused``    every rank raised the same of our errors, which is documented (``refusals.py``)
``pointless``  a loss has no graph, on some rank; or the program amplifies rounding so much that numbers say nothing
``fault``      anything else: other numbers, another exception, an error on some ranks only, a hang
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pickle
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from fuzz.comparing import TOO_ROUGH, amplified_rounding, differences, tolerance_of
from fuzz.program import Program
from fuzz.refusals import is_documented
from fuzz.running import NoGraphError, run_sharded, run_unsharded
from harness.pool import run_on_pool
from harness.worker import Job

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Result:
    kind: str
    text: str = ""

    @property
    def headline(self) -> str:
        return self.text.partition("\n")[0]


def run(program: Program, lib: str = "fsdp2", timeout_s: float = TIMEOUT_S) -> Result:
    """Run it on ``program.world`` ranks, which stay for the next one unless it is a fault.

    lib: "fsdp2", or a module with the same names; "torch" is torch's FSDP2
    """
    arguments = {"program": pickle.dumps(program), "lib": pickle.dumps(lib)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = Job(__name__, __file__, "_body", arguments, pickle.dumps(list(warnings.filters)))
    outcome = run_on_pool(program.world, job, timeout_s)
    if outcome.kind == "passed":
        return Result("right")
    if outcome.kind == "skipped":
        return Result("pointless", outcome.text)
    if outcome.kind == "xfailed" and (lib != "fsdp2" or is_documented(outcome.text.partition("\n")[0], program)):
        return Result("refused", outcome.text)
    return Result("fault", re.sub(r"^\[rank \d+ of \d+\] ", "", outcome.text) + "".join(outcome.output))


class _Body:
    """What the ranks of the pool look for under a test's name."""

    @staticmethod
    def on_ranks_body(program: Program, lib: str) -> None:
        module = importlib.import_module("torch.distributed.fsdp" if lib == "torch" else lib)
        from fsdp2 import FSDPError

        rank = dist.get_rank()
        unsharded = run_unsharded(program, rank)
        steps = run_sharded(program, rank, module)
        is_rough = False
        for index in range(len(program.steps)):
            try:
                expected = next(unsharded)
            except NoGraphError:
                pytest.skip("a loss without a graph")
            try:
                actual = next(steps)
            except FSDPError as error:
                refusal = f"{type(error).__name__}: {re.sub(r'^.rank .*?. ', '', str(error))}"
            else:
                if differences(actual, expected, program, index, tolerance_of(program)):
                    tolerance = tolerance_of(program, _amplified(program))
                    if tolerance >= TOO_ROUGH:
                        is_rough, tolerance = True, math.inf  # rounding does not change which gradients and shapes there are
                    if found := differences(actual, expected, program, index, tolerance):
                        pytest.fail("\n".join(found), pytrace=False)
                continue
            pytest.xfail(refusal)  # outside of the handler, so that nothing holds the frames of the error
        flags = torch.tensor(int(is_rough))
        dist.all_reduce(flags)
        if flags:
            pytest.skip("a program that amplifies rounding")


def _amplified(program: Program) -> float:
    """By how much fp32 changes what any rank sees of the unsharded model in any step.

    Rounding is a matter of chance: one rank's view of one step may show a tenth of what a program does to it.
    """
    largest = 0.0
    for rank in range(dist.get_world_size()):
        rounded, exact = (run_unsharded(program, rank, dtype) for dtype in (torch.float32, torch.float64))
        with contextlib.suppress(NoGraphError):
            for _ in program.steps:
                largest = max(largest, amplified_rounding(next(rounded), next(exact), program))
    return largest


_body = _Body
