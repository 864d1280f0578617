"""``watch``: light checks in every step, and some more in a few of them.

Three hooks run in a step: before the root's forward, at the end of backward, before the optimizer's step. In the first two steps, and
in every hundredth after, they look at data, scales and switches, and ranks exchange what they saw; in the others they count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import SWITCH, require
from ..core import torch_compat as compat
from ..core.comm.agreement import agree, default_group
from ..core.group.param import ShardedParam, sharded_from
from ..errors import ArgumentError, DoctorError, DoctorWarning
from ..user_warnings import warn
from . import clipping
from .arguments import checked_number_of_steps, ignored_checks
from .finding import Finding, Report, report_of
from .inspected import inspect
from .optimizers import never_averaged
from .step_checks import (
    Observed,
    accumulation_switches,
    clip_of_nothing,
    data_finding,
    digest_of,
    gradients_left,
    missing_gradients,
    same_data,
    sample_of_gradients,
    scale_findings,
    scale_since,
    used_outside,
)


def watch(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    strict: bool = False,
    ignore: Iterable[str] = (),
    every: int = 100,
    patience: int = 8,
) -> Watch:
    """Watch the steps of ``model``, from now until the end of the ``with`` block, or until ``stop()``.

    optimizer:  one, or all that train it; the first one's step ends a step
    strict:     raise DoctorError where the default warns (DoctorWarning), each fault once
    ignore:     names of checks that are left out
    every:      the first two steps, and each of this number, are looked at closely
    patience:   steps after which a gradient that never came is reported; earlier where the watch ends before
    Collective: yes: in steps that are looked at closely ranks exchange what they saw, over all ranks of the job, before the first
                optimizer's step
    Raises:     ModuleError if ``model`` is not sharded; ArgumentError for another wrong argument

    Example:
        with fsdp2.doctor.watch(model, optimizer) as watching:
            model(x).sum().backward()
            optimizer.step()
        watching.report
    """
    return Watch(model, optimizer, strict=strict, ignore=ignore, every=every, patience=patience)


class Watch:
    """What ``watch`` returns; its ``report`` holds what it has found so far."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        strict: bool,
        ignore: Iterable[str],
        every: int,
        patience: int,
        tell: Callable[[Finding], None] | None = None,
    ) -> None:
        require("watch", SWITCH, strict=strict)
        inspected = inspect(model, optimizer, "watch")
        if not inspected.optimizers:
            raise ArgumentError(
                "watch got no optimizer",
                expected="an optimizer, or all that train the model: the first one's step ends a step",
                fix="doctor.watch(model, optimizer)",
            )
        self._inspected = inspected
        self._units, self._params, self._ranks = inspected.units, inspected.params, inspected.ranks
        self._ignored = ignored_checks("watch", ignore)
        self._every = checked_number_of_steps("watch", "every", every)
        self._patience = checked_number_of_steps("watch", "patience", patience)
        self._tell = tell or (_raise if strict else _warn)
        self._found: dict[tuple[str, tuple[str, ...]], Finding] = {}
        self._num_steps = 0
        self._no_gradient = [param for param, _ in self._params if param.sharded.requires_grad]
        self._close = _Close()
        self._has_gradients = False  # a backward has ended since the last step
        self._saw_backward = False  # in any step: under a compiler that has the whole step, none is seen
        self._same_data: set[tuple[int, ...]] = set()
        self._undo = contextlib.ExitStack()
        self._begin(model, inspected.optimizers)

    def _begin(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        undo = self._undo
        undo.callback(model.register_forward_pre_hook(compat.dynamo_disabled(self._before_forward), with_kwargs=True).remove)
        for _, unit in self._units:
            unit.watchers = (*unit.watchers, self._after_backward)
            undo.callback(_remove_watcher, unit, self._after_backward)
        for param in self._no_gradient:
            # Autograd calls it where a graph has the sharded parameter itself, which no reduction does.
            handle = param.sharded.register_hook(functools.partial(self._on_shard, param))  # type: ignore[no-untyped-call]
            undo.callback(handle.remove)
        hooks = [self._before_step, *[self._strike_off] * (len(optimizers) - 1)]
        for optimizer, hook in zip(optimizers, hooks, strict=True):
            undo.callback(optimizer.register_step_pre_hook(compat.dynamo_disabled(hook)).remove)
        clipping.listen(self._on_clip)
        undo.callback(clipping.ignore, self._on_clip)

    @property
    def report(self) -> Report:
        return report_of([self._found.values()])

    def stop(self) -> None:
        """End the watch: all hooks are removed, and gradients that never came are reported. A second time: nothing."""
        self._undo.close()
        if self._num_steps:
            self._note_missing()

    def give_up(self) -> None:
        """End it in a program that has failed: gradients that have not come yet are no finding."""
        self._num_steps = 0
        self.stop()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:
            self.give_up()

    # --- moments of a step ---

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        close = self._close
        if close.is_on and torch.is_grad_enabled():
            close.data = digest_of((args, kwargs, close.data and torch.tensor(close.data, device="cpu")))

    def _after_backward(self) -> None:
        self._has_gradients = self._saw_backward = True
        close = self._close
        if close.is_on:
            close.findings += accumulation_switches(self._units)
            close.gradient = sample_of_gradients(param for param, _ in self._params)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_steps += 1
        if self._no_gradient:
            self._strike_off()
            if self._num_steps >= self._patience:
                self._note_missing()
        close = self._close
        if close.is_on:
            self._look_closely(close)
        self._has_gradients = False
        self._close = _Close(self._num_steps == 1 or (self._num_steps + 1) % self._every == 0, close.findings)

    def _strike_off(self, *_: Any) -> None:
        """Also before the step of another optimizer, which may clear its gradients at once: one for each parameter, run in backward."""
        self._no_gradient = [param for param in self._no_gradient if param.sharded.grad is None]

    def _note_missing(self) -> None:
        """Note parameters without gradients, but for those that wait to be reduced, which another finding names."""
        waiting = {name for finding in self._found.values() if finding.check == "step-before-reduction" for name in finding.params}
        missing, self._no_gradient = self._no_gradient, []
        self._note(missing_gradients([param for param in missing if param.fqn not in waiting], self._num_steps))

    def _look_closely(self, close: _Close) -> None:
        """Collective: yes."""
        close.findings += gradients_left(self._units)
        close.findings += never_averaged(self._inspected)
        scale = None if close.gradient is None else scale_since(*close.gradient)
        said = agree(default_group(), None, (close.findings, Observed(self._ranks, close.data, scale)))
        observed = [each for _, each in said]
        same = same_data(observed) if len(said) > 1 else set()
        together = [data_finding(ranks) for ranks in same & self._same_data]
        self._same_data = same
        if len(said) > 1:
            together += scale_findings(observed)
        close.findings = []
        self._note(report_of([[*findings, *together] for findings, _ in said]))

    def _on_clip(self, params: Sequence[Tensor]) -> None:
        if not self._close.is_on:
            return
        whole = {id(cut.sharded) for param in params if (cut := sharded_from(param)) is not None}
        own = [param for param, _ in self._params if id(param.sharded) in whole.union(map(id, params))]
        if params and not own:
            return  # another model's
        if all(param.grad is None for param in params):
            self._note_own(clip_of_nothing(after_step=False))
        elif self._saw_backward and not self._has_gradients:
            self._note_own(clip_of_nothing(after_step=True))

    def _on_shard(self, param: ShardedParam, grad: Tensor) -> None:
        self._note_own(used_outside((param.fqn,)))

    # --- findings ---

    def _note_own(self, finding: Finding) -> None:
        """Note what this rank has seen alone; the next close look shows it to the others, of which rank 0 warns."""
        self._close.findings += self._note([finding])

    def _note(self, findings: Iterable[Finding]) -> list[Finding]:
        """Tell each once, whatever numbers it has in the next step. Returns those that are new."""
        new = []
        for finding in findings:
            key = finding.check, finding.params
            if finding.check not in self._ignored and key not in self._found:
                self._found[key] = finding
                self._tell(finding)
                new.append(finding)
        return new


class _Close:
    """What a close look at one step has found. A new watch begins with one.

    findings: what the other ranks have not been told
    data:     digest of the inputs of all micro-batches so far
    gradient: a parameter, and a sample of its gradient at the end of the last backward
    """

    __slots__ = ("data", "findings", "gradient", "is_on")

    def __init__(self, is_on: bool = True, findings: Iterable[Finding] = ()) -> None:
        self.is_on = is_on
        self.data: int | None = None
        self.findings = list(findings)
        self.gradient: tuple[ShardedParam, Tensor] | None = None


def _raise(finding: Finding) -> None:
    raise DoctorError(f"the doctor found something\n{finding}")


def _warn(finding: Finding) -> None:
    warn(str(finding), DoctorWarning)


def _remove_watcher(unit: Any, watcher: Callable[[], None]) -> None:
    unit.watchers = tuple(each for each in unit.watchers if each != watcher)
