"""``ledger``: a JSON line for each step and rank.

It hears what the collective log tells, and what optimizers do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from ..arguments import NATURAL, Kind, require
from ..doctor.finding import Finding
from ..doctor.watching import watch
from ..errors import ArgumentError, got
from ..planner.result import Plan
from .memory_now import allocator_peak, forget_allocator_peak, kept_bytes
from .meter import Counts, Meter
from .run_folder import Values, write_json
from .step_lines import StepLines

Findings: TypeAlias = watch | Iterable["Finding | Findings"]


_TOKENS = Kind(lambda each: callable(each) or NATURAL.holds(each), "a number of tokens, or a function that returns it", "8192")
_RESUMED = Kind(lambda each: hasattr(each, "lost"), "what Checkpointer.load returns", "checkpointer.load()")
_PLAN = Kind(lambda each: isinstance(each, Plan), "what fsdp2.plan returns", "fsdp2.plan(model, world_size=8)")


class ledger(StepLines):  # noqa: N801 (called as a function is)
    """Write a line for each step of this rank into ``folder``, from now until the end of the ``with`` block, or until ``stop()``.

    folder:     one for a run, the same on all ranks of a host; an earlier run's lines are dropped
    optimizer:  one, or all that train it: the step of the last one ends a step; None: each step of any optimizer
    tokens:     that this rank trains on in a step, or a function that says how many there were in the last one
    first_step: number of the step that comes first; of a run that goes on, the next one
    plan:       the prediction of ``fsdp2.plan``; ``fsdp2 report`` draws it next to the measurements
    resumed:    what ``Checkpointer.load`` has returned, for the report: after which step the run goes on, and what was lost
    findings:   of ``doctor.check``, a ``doctor.watch`` (its ``report`` when the ledger stops), or several of both, for the report
    Collective: no; without it nothing is counted, and a step asks a module attribute where it would be
    Raises:     ModuleError if ``model`` is not sharded; ArgumentError for something else than optimizers; OrderError while another
                ledger writes into ``folder``

    Example:
        with fsdp2.ledger(folder, model, optimizer, tokens=4 * 16):
            model(x).sum().backward()
            optimizer.step()
    """

    def __init__(
        self,
        folder: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        tokens: int | Callable[[], int] | None = None,
        first_step: int = 1,
        plan: Plan | None = None,
        resumed: Any = None,
        findings: Findings = (),
    ) -> None:
        require("ledger", _TOKENS.or_none, tokens=tokens)
        require("ledger", _PLAN.or_none, plan=plan)
        require("ledger", _RESUMED.or_none, resumed=resumed)
        list(_each(findings))  # on every rank, although rank 0 alone writes them
        self._tokens, self._plan, self._resumed, self._findings = tokens, plan, resumed, findings
        self._num_steps = 0
        self._kept: dict[str, int] = {}
        self._meter = Meter()
        super().__init__("ledger", folder, model, optimizer, first_step, self._meter)

    def _begin(self, undo: contextlib.ExitStack) -> None:
        groups = self._inspected.groups
        self._device = groups[0].device if groups else torch.device("cpu")
        self._meter.time_on(self._device)
        super()._begin(undo)
        self._write_run()
        forget_allocator_peak(self._device)
        self._began = time.perf_counter()

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = time.perf_counter()
        counts = self._meter.take()
        if self._num_steps < 3 or self._num_steps % 50 == 0:  # it walks over all parameters, and changes seldom
            self._kept = kept_bytes(self._inspected.model, self._inspected.optimizers or [optimizer])
        memory = self._kept | self._meter.memory.most
        line = {
            "step": self._step,
            "rank": self._rank,
            "time": time.time(),
            "duration_ms": (now - self._began) * 1e3,
            "tokens": self._tokens() if callable(self._tokens) else self._tokens,
            "memory": memory,
            "allocator_peak": allocator_peak(self._device),
            **_said(counts),
        }
        self._lines.write(line)
        self._meter.memory.forget_most()
        forget_allocator_peak(self._device)
        self._began = now
        self._step += 1
        self._num_steps += 1

    def _end(self) -> None:
        self._write_run()

    def _write_run(self) -> None:
        """Write it at the beginning, for a run that crashes, and at the end, when a watch knows more."""
        if self._rank != 0:
            return
        said: Values = {
            "ranks": self._num_ranks,
            "device": str(self._device),
            "torch": torch.__version__,
            "fsdp2": importlib.metadata.version("fsdp2"),
            "model": type(self._inspected.model).__name__,
            "plan": None if self._plan is None else plan_said(self._plan),
            "resumed": self._resumed and {key: getattr(self._resumed, key) for key in ("step", "source", "lost")},
            "findings": [dataclasses.asdict(each) for each in _each(self._findings)],
        }
        write_json(self.folder / "run.json", said)


def _each(findings: Findings) -> Iterator[Finding]:
    found: Any = findings.report if isinstance(findings, watch) else findings
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ArgumentError(
            got("ledger", "findings", findings),
            expected="what doctor.check or doctor.watch returns, or a list of these",
            fix="for instance findings=[doctor.check(model, optimizer)]",
        )
    for each in found:
        if isinstance(each, Finding):
            yield each
        else:
            yield from _each(each)


def _said(counts: Counts) -> Values:
    """Times in ms."""
    communication: dict[str, dict[str, Values]] = {}
    for (phase, kind), tally in counts.tallies.items():
        communication.setdefault(phase, {})[kind] = {
            "calls": tally.calls,
            "nbytes": tally.nbytes,
            "sent": tally.sent,
            "exposed_ms": tally.exposed * 1e3,
        }
    computing: dict[str, dict[str, float]] = {}
    for (phase, unit), seconds in counts.computing.items():
        computing.setdefault(phase, {})[unit] = round(seconds * 1e3, 3)
    said: Values = {"communication": communication, "computing_ms": computing}
    return said | {"exposed_ms": counts.exposed * 1e3, "hooks_ms": counts.hooks * 1e3}


def plan_said(plan: Plan) -> Values:
    """The part of a plan that a report shows."""
    peak = plan.memory.peak
    return {
        "peak": {"nbytes": peak.nbytes, "by_kind": peak.by_kind, "phase": peak.phase, "where": peak.where},
        "most": plan.memory.most,
        "moments": [dataclasses.asdict(each) for each in plan.memory.moments],
        "traffic": [dataclasses.asdict(each) for each in plan.traffic],
    }
