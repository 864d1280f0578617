"""One rank of ``fsdp2 doctor``: it runs the script with torch's names bound to ours, watches the model that trains, and ends it.

The model is the outermost sharded one whose forward runs first; it is checked before the first step of an optimizer, when all that
trains it is there. Of a script that fails, the first rank to fail says what was found so far: the launcher ends the others. It refuses
to know what is a fault.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.group.param import sharded_from
from ..core.iteration.module_state import unit_of
from ..installation import install
from .checking import check, check_alone
from .finding import Finding, Report, report_of
from .initialisation import canaries
from .watching import Watch

FOLDER = "FSDP2_DOCTOR_FOLDER"
"""The environment variable with a folder of this run, which all its ranks see."""


class EnoughSteps(BaseException):
    """The script has made its steps. No Exception: scripts catch those and go on."""


class Patient:
    """findings: of ``check`` and of the watch; num_steps: of the optimizer that stepped first; failure: what the script raised"""

    def __init__(self, max_steps: int) -> None:
        self.findings: dict[Finding, None] = {}
        self.num_steps = 0
        self.failure: Exception | None = None
        self.status = 0
        self._max_steps = max_steps
        self._model: nn.Module | None = None
        self._first: Optimizer | None = None
        self._watch: Watch | None = None

    @property
    def has_looked(self) -> bool:
        return self._watch is not None

    def run(self, script: str, arguments: list[str]) -> None:
        """Run ``script`` to its last step, or to its end, or until it fails."""
        handles = [register_module_forward_pre_hook(self._before_forward), register_optimizer_step_pre_hook(self._before_step)]
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        try:
            with install(), canaries():
                runpy.run_path(script, run_name="__main__")
        except EnoughSteps:
            pass
        except SystemExit as end:
            self.status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
        except Exception as error:
            self.failure, self.status = error, 1
            traceback.print_exc()
            self._look_alone()
        finally:
            for handle in handles:
                handle.remove()
            if self._watch is not None:
                if self.failure is not None:
                    self._watch.__exit__(type(self.failure), self.failure, None)
                self._watch.stop()

    def _look_alone(self) -> None:
        """The script failed before an optimizer has stepped: its fault may be one that this rank can see by itself."""
        if self._watch is None and self._model is not None:
            with contextlib.suppress(Exception):  # of a model that is half made, behind an error that has been printed
                self._add(*check_alone(self._model))

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
            # Optimizers that have not stepped yet are unknown.
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
    if patient.failure is not None:
        with _first_to_fail(os.environ.get(FOLDER)) as is_first:
            if is_first:
                _say(patient, script, report)
    elif os.environ.get("RANK", "0") == "0":
        _say(patient, script, report)
    if patient.failure is None and dist.is_initialized():
        dist.destroy_process_group()
    return patient.status or int(bool(report) and strict == "1")


def _say(patient: Patient, script: str, report: Report) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    sys.stdout.write(f"\nfsdp2 doctor: {patient.num_steps} steps of {script}\n")
    if patient.failure is not None:
        error = "".join(traceback.format_exception_only(patient.failure)).strip()
        sys.stdout.write(f"the script failed on rank {os.environ.get('RANK', '0')}: {error}\n")
    if patient.has_looked or report:
        report.show()
    else:
        sys.stdout.write("no optimizer has stepped on a model that fully_shard was called on: nothing was looked at\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _first_to_fail(folder: str | None) -> Iterator[bool]:
    """Whether this is the rank that speaks; it has spoken when the block ends. The launcher ends it once another rank is gone.

    folder: that all ranks see; None: there is but this rank
    """
    if folder is None:
        yield True
        return
    claimed, spoken = (os.path.join(folder, name) for name in ("claimed", "spoken"))
    try:
        os.close(os.open(claimed, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        until = time.monotonic() + 10
        while not os.path.exists(spoken) and time.monotonic() < until:
            time.sleep(0.05)
        yield False
        return
    yield True
    os.close(os.open(spoken, os.O_CREAT))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # As the examples do: a thread of gloo (torch <= 2.13) may still be dropping its last tensor when the interpreter ends.
    os._exit(status)
