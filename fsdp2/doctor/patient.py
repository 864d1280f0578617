"""One rank of ``fsdp2 doctor``: it runs the script with torch's names bound to ours, watches the model that trains, and ends it.

The model is the outermost sharded one whose forward runs first; it is checked before the first step of an optimizer, when all that
trains it is there. It refuses to know what is a fault.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.group.param import sharded_from
from ..core.iteration.module_state import unit_of
from ..installation import install
from .checking import check
from .finding import Finding, report_of
from .initialisation import canaries
from .watching import Watch


class EnoughSteps(BaseException):
    """The script has made its steps. No Exception: scripts catch those and go on."""


class Patient:
    """findings: of ``check`` and of the watch; num_steps: of the optimizer that stepped first"""

    def __init__(self, max_steps: int) -> None:
        self.findings: dict[Finding, None] = {}
        self.num_steps = 0
        self._max_steps = max_steps
        self._model: nn.Module | None = None
        self._first: Optimizer | None = None
        self._watch: Watch | None = None

    def run(self, script: str, arguments: list[str]) -> None:
        """Run ``script`` to its last step, or to its end."""
        handles = [register_module_forward_pre_hook(self._before_forward), register_optimizer_step_pre_hook(self._before_step)]
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        try:
            with install(), canaries():
                runpy.run_path(script, run_name="__main__")
        except EnoughSteps:
            pass
        finally:
            for handle in handles:
                handle.remove()
            if self._watch is not None:
                self._watch.stop()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._model is None and unit_of(module) is not None:
            self._model = module

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        model = self._model
        if model is None:
            return
        if self._watch is None:
            ours = {id(param) for param in model.parameters()}
            held = [param for group in optimizer.param_groups for param in group["params"]]
            if not any(id(param) in ours or sharded_from(param) is not None for param in held):
                return  # another model's
            self._first = optimizer
            # Others of its optimizers have not stepped yet: nobody knows them.
            self._add(*check(model, optimizer))
            self._watch = Watch(
                model,
                optimizer,
                strict=False,
                ignore=(),
                every=1,
                patience=self._max_steps + 1,
                tell=lambda finding: self._add(finding),
            )
        if optimizer is self._first:
            if self.num_steps == self._max_steps:
                raise EnoughSteps
            self.num_steps += 1

    def _add(self, *findings: Finding) -> None:
        self.findings.update(dict.fromkeys(findings))


def main(arguments: list[str]) -> int:
    """arguments: number of steps, whether findings are a failure, the script, its arguments"""
    max_steps, strict, script, *rest = arguments
    patient = Patient(int(max_steps))
    patient.run(script, rest)
    report = report_of([patient.findings])
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.flush()
        sys.stdout.write(f"\nfsdp2 doctor: {patient.num_steps} steps of {script}\n")
        if patient._watch is None:
            sys.stdout.write("no optimizer has stepped on a model that fully_shard was called on: nothing was looked at\n")
        else:
            report.show()
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(bool(report) and strict == "1")


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # As the examples do: a thread of gloo (torch <= 2.13) may still be dropping its last tensor when the interpreter ends.
    os._exit(status)
