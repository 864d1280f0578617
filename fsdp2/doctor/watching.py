"""``watch``: light checks in every step, and some more in a few of them.

Hooks run around the root's forward, at the end of backward, and before the optimizer's step. In the first two steps, and in every
hundredth after, they look at data, gradients and switches, and ranks exchange what they saw; in the others they count.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ..arguments import COUNT, SWITCH, require
from ..errors import ArgumentError, DoctorError, DoctorWarning
from ..inspect import Parameter, current_step, exchange, find_tensors, local_of, parameters_of
from ..lifecycle import UntilStopped
from ..torch_names import torch_compiler, torch_dtensors
from ..user_warnings import warn
from . import hearing, learning, loss_weights
from .arguments import ignored_checks
from .finding import Finding, Report, report_of
from .inspected import inspect
from .meeting import Meeting
from .optimizers import never_averaged, unseen_writes
from .replicas import digest
from .step_checks import (
    CLIPPED_LATE,
    CLIPS_NOTHING,
    DROPPED,
    SAME_DATA,
    SAMPLED,
    STEPPED_AGAIN,
    USED_OUTSIDE,
    Observed,
    accumulation_switches,
    all_zero,
    digest_of,
    gradients_left,
    missing_gradients,
    peers,
    same_data,
    same_random,
    sample_of,
    sample_of_gradients,
    scale_findings,
    scale_since,
    some_miss,
)


class watch(UntilStopped):  # noqa: N801 (called as a function is)
    """Watch the steps of ``model``, from now until the end of the ``with`` block, or until ``stop()``. ``report``: its findings so far

    Its private attributes are what it was given, and what one check has to remember from one moment of a step to another.

    optimizer:  one, or all that train it; the first one's step ends a step
    strict:     raise DoctorError where the default warns (DoctorWarning), each fault once
    ignore:     names of checks that are left out
    every:      the first two steps, and each of this number, are looked at closely
    patience:   steps after which a gradient that never came is reported; earlier where ``stop()`` ends the watch before
    Collective: yes: in steps that are looked at closely ranks exchange what they saw, over all ranks of the job, before the first
                optimizer's step
    Raises:     ModuleError if ``model`` is not sharded; ArgumentError for another wrong argument

    Example:
        with fsdp2.doctor.watch(model, optimizer) as watching:
            model(x).sum().backward()
            optimizer.step()
        watching.report
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        strict: bool = False,
        ignore: Iterable[str] = (),
        every: int = 100,
        patience: int = 8,
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
        self._device = inspected.groups[0].device if inspected.groups else torch.device("cpu")
        self._ignored = ignored_checks("watch", ignore)
        require("watch", COUNT, every=every, patience=patience)
        self._every, self._patience = every, patience
        self.tell: Callable[[Finding], None] = _raise if strict else _warn  # the command writes them down instead
        self._found: dict[tuple[str, tuple[str, ...]], Finding] = {}
        self._num_steps = 0
        self._no_gradient = [param for param in self._params if param.sharded.requires_grad]
        self._close = _Close()
        self._has_gradients = False  # a backward has ended since the last step
        self._saw_backward = False  # in any step: under a compiler that has the whole step, none is seen
        self._repeated: dict[str, set[tuple[int, ...]]] = {}  # what ranks had in common at the last close look
        self._stepped: dict[int, Optimizer] = {}  # which optimizer has stepped a parameter since the last backward
        self._used: set[Parameter] = set()  # one of each optimizer's, with whose gradient it has stepped
        self._before: tuple[Parameter, Tensor, int] | None = None  # a parameter's values, and how many steps have left them so
        self._metric: float | None = None
        self._had_grad = True  # in the last forward
        self._has_dropped = False  # gradients in the last close look
        self._stepped_with: tuple[TensorWeakRef, int] | None = None  # a gradient, and the version that it had
        self._meeting = Meeting()
        super().__init__()

    def _begin(self, undo: contextlib.ExitStack) -> None:
        model, optimizers = self._inspected.model, self._inspected.optimizers
        undo.push(self._end)
        undo.callback(self._meeting.leave)
        # Ahead of the hook that gathers: a rank that others wait for must say that it begins a forward.
        before = torch_compiler.dynamo_disabled(self._before_forward)
        undo.callback(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        undo.callback(model.register_forward_hook(torch_compiler.dynamo_disabled(self._after_forward)).remove)
        for unit in self._units:
            undo.callback(unit.on_backward_end(self._after_backward))
        for param in self._no_gradient:
            # Autograd calls it where a graph has the sharded parameter itself, which no reduction does.
            handle = param.sharded.register_hook(functools.partial(self._on_shard, param))  # type: ignore[no-untyped-call]
            undo.callback(handle.remove)
        hooks = [self._before_step, *[self._before_any_step] * (len(optimizers) - 1)]
        for optimizer, hook in zip(optimizers, hooks, strict=True):
            undo.callback(optimizer.register_step_pre_hook(torch_compiler.dynamo_disabled(hook)).remove)
        for calls, listener in (
            (hearing.clips, self._on_clip),
            (hearing.backwards, self._on_backward),
            (hearing.all_reduces, self._on_all_reduce),
            (hearing.metrics, self._on_metric),
            (hearing.losses, self._on_loss),
        ):
            undo.callback(calls.listen(listener))

    @property
    def report(self) -> Report:
        return report_of([self._found.values()])

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Report gradients that never came; in a program that fails they are no finding."""
        if kind is None and self._num_steps:
            self._note_missing()

    def give_up(self) -> None:
        """End it in a program that has failed."""
        self._num_steps = 0
        self.stop()

    # --- moments of a step ---

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        close = self._close
        if self._device.type != "cpu":  # there forward itself raises
            # Programs exchange weights for their average, and back, where training and evaluation meet.
            had_grad, self._had_grad = self._had_grad, torch.is_grad_enabled()
            for finding in unseen_writes(self._inspected) if close.is_on or had_grad is not self._had_grad else ():
                self._note_own(finding)
        if close.is_on and torch.is_grad_enabled():
            if close.backwards.gave and all(param.sharded.grad is None for param in self._params):
                before = close.backwards  # the step was not taken: another begins
                close.data, close.backwards = [], _Backwards(added=before.added, is_through=before.is_through)
            close.data.append(digest_of((args, kwargs)))
            inputs: list[Tensor] = []
            find_tensors((args, kwargs), inputs)
            close.backwards.continues = any(each.requires_grad for each in inputs)
            close.random = learning.random_state(self._device) if close.random is None else close.random
            self._meeting.begin_forward()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        close = self._close
        if close.is_on and torch.is_grad_enabled():
            close.draws = close.draws or learning.random_state(self._device) != close.random
            outputs: list[Tensor] = []
            find_tensors(output, outputs)
            for each in outputs:
                if each.requires_grad:
                    each.register_hook(functools.partial(self._begin_backward, close, close.backwards.continues))  # type: ignore[no-untyped-call]

    def _begin_backward(self, close: _Close, continues: bool, grad: Tensor) -> None:
        """Backward hands ``grad`` to an output of the root, before any parameter has its gradient.

        continues: to the inputs, so it may be for another model: that of a generator's loss runs through its discriminator
        """
        close.losses = (close.losses + digest(grad)) & 0xFFFFFFFF  # outputs in any order
        if close.gradient is not None and close is self._close:
            param, _ = close.gradient
            is_same = close.step == current_step() and torch.equal(_some_values(param), close.values)  # no optimizer has stepped
            close.has_dropped |= is_same and sample_of(param) is None and not close.backwards.is_through
        close.backwards.goes_through |= continues
        close.backwards.added = [param for param in close.backwards.added if _is_there(sample_of(param))]
        close.left = {param: left for param, left in close.left.items() if not _differs(sample_of(param), left)}
        for param in self._used:
            now = sample_of(param)
            if now is not None and now.any():
                close.left.setdefault(param, now)
        self._used = set()

    def _after_backward(self) -> None:
        self._has_gradients = self._saw_backward = True
        close = self._close
        if close.is_on:
            close.findings += accumulation_switches(self._units)
            close.gradient = sample_of_gradients(self._params)
            close.backwards.gave = close.gradient is not None
            if close.gradient is not None:
                close.values, close.step = _some_values(close.gradient[0]), current_step()
            close.backwards.is_through, close.backwards.goes_through = close.backwards.goes_through, False
            accumulates = any(unit.accumulates() for unit in self._units)
            close.backwards.accumulates |= accumulates
            self._stepped.clear()
            if not any(module.training for module in self._inspected.model.modules()):
                close.findings.append(learning.in_eval_mode(self._inspected.model))
            added = [param for param, left in close.left.items() if param.grad is not None and _differs(sample_of(param), left)]
            close.backwards.added += added
            if added or not accumulates:  # else gradients are as they were, and a backward follows
                close.left.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_steps += 1
        if self._no_gradient and self._num_steps >= self._patience:
            self._strike_off()
            self._note_missing()
        close = self._close
        if close.is_on:
            self._look_closely(close, optimizer)
        self._before_any_step(optimizer)
        self._has_gradients = False
        self._used = self._used if self._num_steps == 1 else set()
        self._close = _Close(self._num_steps == 1 or (self._num_steps + 1) % self._every == 0, [*close.findings])

    def _before_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Of several optimizers each may clear its gradients at once: one for each parameter, run in backward."""
        if self._no_gradient:
            self._strike_off()
        if self._close.is_on:
            for finding in (*self._not_cleared(optimizer), *self._stepping(optimizer)):
                self._note_own(finding)

    def _not_cleared(self, optimizer: Optimizer) -> Iterator[Finding]:
        """It steps with gradients to which a backward has added, and that nobody has cleared since."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        names = tuple(param.fqn for param in self._close.backwards.added if id(param.sharded) in held and _is_there(sample_of(param)))
        if names:
            yield learning.NOT_CLEARED.of(names)

    def _stepping(self, optimizer: Optimizer) -> Iterator[Finding]:
        """Note with which gradients it steps. Finds those with which another has stepped."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        own = [param for param in self._params if id(param.sharded) in held and param.sharded.grad is not None]
        twice = [param.fqn for param in own if not _are_one(self._stepped.get(id(param), optimizer), optimizer)]
        if twice:
            yield learning.STEPPED_TWICE.of(twice)
        self._stepped.update(dict.fromkeys(map(id, own), optimizer))
        sampled = sample_of_gradients(own)
        if sampled is not None:
            self._used.add(sampled[0])

    def _strike_off(self) -> None:
        self._no_gradient = [param for param in self._no_gradient if param.sharded.grad is None]

    def _note_missing(self) -> None:
        """Note parameters without gradients, but for those that wait to be reduced, which another finding names."""
        waiting = {name for finding in self._found.values() if finding.check == "step-before-reduction" for name in finding.params}
        missing, self._no_gradient = self._no_gradient, []
        self._note(missing_gradients([param for param in missing if param.fqn not in waiting], self._num_steps))

    def _look_closely(self, close: _Close, optimizer: Optimizer) -> None:
        """Collective: yes."""
        close.findings += gradients_left(self._units)
        close.findings += never_averaged(self._inspected)
        largest = learning.largest_gradients(self._params)
        if getattr(optimizer, "found_inf", None) is None:  # by a loss scaler, for an optimizer that leaves out such steps itself
            close.findings += learning.not_finite(largest, not close.is_loss_finite)
        scale = None if close.gradient is None else scale_since(*close.gradient)
        if close.is_clipped or (scale is not None and scale.factor == 1):  # else the program scales by itself
            close.findings += learning.without_scaler(self._inspected.groups)
        if close.reduced_again:
            close.findings.append(learning.REDUCED_AGAIN.of(dict.fromkeys(close.reduced_again)))
        close.findings += self._not_cleared(optimizer)
        close.findings += self._unchanged(optimizer)
        close.findings += loss_weights.factors_differ(self._inspected.groups)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        grad: Any = next((param.sharded.grad for param, most in largest.items() if most and id(param.sharded) in held), None)
        if grad is not None:
            version = local_of(grad)._version  # a backward makes another gradient, or adds to this one
            before, its_version = self._stepped_with or (None, 0)
            if before is not None and before() is grad and version == its_version:
                close.findings.append(STEPPED_AGAIN.of(param.fqn for param in largest))
            self._stepped_with = TensorWeakRef(grad), version
        if close.has_dropped and self._has_dropped and close.gradient is not None:
            close.findings.append(DROPPED.of([close.gradient[0].fqn]))
        self._has_dropped = close.has_dropped
        if not self._meeting.hold(self._ranks):
            self._note([*close.findings, learning.step_on_some_ranks(self._ranks, self._meeting.absent)])
            close.findings = []
            return
        random = close.random if close.draws else None
        is_zero = bool(largest) and not any(largest.values())
        settings = learning.settings_of(self._inspected.optimizers)
        missing = tuple(param.fqn for param in self._params if param.sharded.requires_grad and param.sharded.grad is None)
        heard = [each for each in close.backwards.heard if each is not None]
        is_one_each = len(heard) == len(close.backwards.heard) == close.backwards.count
        means = tuple(heard) if is_one_each else None
        inputs = [each for each in close.data if each is not None]
        data = zlib.crc32(repr(inputs).encode()) if inputs else None
        seen = Observed(self._ranks, data, scale, close.losses, random, is_zero, settings, self._metric, missing, means)
        said = exchange((close.findings, seen))
        is_by_task = len(set(inputs)) < len(inputs)  # micro-batches are different ones
        together = self._compared([each for _, each in said], close.backwards.accumulates and not is_by_task)
        close.findings, self._metric = [], None
        self._note(report_of([[*findings, *together] for findings, _ in said]))

    def _compared(self, observed: Sequence[Observed], accumulates: bool) -> list[Finding]:
        """Findings on what ranks have seen, the same on all. accumulates: backwards were of micro-batches"""
        weighed: dict[tuple[int, ...], Finding] = {}
        found = [*scale_findings(observed)] if len(observed) > 1 else []
        for seen in peers(observed).values():
            found += learning.settings_differ({rank: observed[rank].settings for rank in seen[0].ranks})
            metrics = {rank: metric for rank in seen[0].ranks if (metric := observed[rank].metric) is not None}
            found += learning.metrics_differ(metrics)
            found += some_miss({rank: observed[rank] for rank in seen[0].ranks})
            heard = {rank: means for rank in seen[0].ranks if (means := observed[rank].heard)}
            if len(heard) == len(seen):
                factor = self._inspected.groups[0].divide_factor() or len(seen)
                found += loss_weights.scale_of(list(heard.values()), factor, accumulates)
                weighed.update((seen[0].ranks, finding) for finding in loss_weights.uneven(heard, accumulates))
        # In one step they may be so by chance, or while a learning rate warms up.
        for name, now, finding in (
            ("data", same_data(observed), SAME_DATA.on),
            ("random", same_random(observed), learning.SAME_RANDOM_NUMBERS.on),
            ("zero", all_zero(observed), lambda ranks: learning.ALL_ZERO),
            ("weights", set(weighed), weighed.__getitem__),
        ):
            found += [finding(ranks) for ranks in now & self._repeated.get(name, set())]
            self._repeated[name] = now
        return found

    def _unchanged(self, optimizer: Optimizer) -> Iterator[Finding]:
        """Finds a parameter that two steps have left as it was; notes the values of one that this step must change."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        times = 0
        if self._before is not None:
            param, before, times = self._before
            times = times + 1 if torch.equal(_some_values(param), before) else 0
            if times == 2:
                yield learning.never_change((param.fqn,), learning.is_rate_zero([optimizer]))
        sampled = sample_of_gradients(param for param in self._params if id(param.sharded) in held)
        self._before = None if sampled is None else (sampled[0], _some_values(sampled[0]), times)

    def _on_clip(self, params: Sequence[Tensor]) -> None:
        if not self._close.is_on:
            return
        clipped = {*map(id, params), *(id(param.sharded) for param in parameters_of(params).values())}
        if params and not any(id(param.sharded) in clipped for param in self._params):
            return  # another model's
        self._close.is_clipped = True
        if all(param.grad is None for param in params):
            self._note_own(CLIPS_NOTHING)
        elif self._saw_backward and not self._has_gradients:
            self._note_own(CLIPPED_LATE)

    def _on_backward(self, losses: Tensor | Sequence[Tensor]) -> None:
        if self._close.is_on:
            found: list[Tensor] = []
            find_tensors(losses, found)
            self._close.is_loss_finite = all(bool(each.detach().isfinite().all()) for each in found)
            self._close.backwards.count += 1

    def _on_loss(self, name: str, args: Any, kwargs: Any, loss: Tensor) -> None:
        if self._close.is_on and torch.is_grad_enabled():
            for finding in loss_weights.listen_to(name, args, kwargs, loss, self._close.backwards.heard):
                self._note_own(finding)

    def _on_all_reduce(self, tensor: Tensor, group: Any) -> None:
        if not (self._close.is_on and self._has_gradients):
            return
        others = set(dist.get_process_group_ranks(group)).intersection(self._ranks) - {dist.get_rank()}
        storage = _storage_of(tensor)
        names = [param.fqn for param in self._params if others and (grad := param.grad) is not None and _storage_of(grad) == storage]
        self._close.reduced_again += names

    def _on_metric(self, scheduler: Any, metric: Any) -> None:
        if any(_are_one(scheduler.optimizer, each) for each in self._inspected.optimizers):
            self._metric = float(metric)

    def _on_shard(self, param: Parameter, grad: Tensor) -> None:
        self._note_own(USED_OUTSIDE.of([param.fqn]))

    # --- findings ---

    def _note_own(self, finding: Finding) -> None:
        """Note what this rank has seen alone; the next close look shows it to the others, and rank 0 warns."""
        self._close.findings += self._note([finding])

    def _note(self, findings: Iterable[Finding]) -> list[Finding]:
        """Tell each once, even if its numbers differ in the next step. Returns those that are new."""
        new = []
        for finding in findings:
            key = finding.check, finding.params
            if finding.check not in self._ignored and key not in self._found:
                self._found[key] = finding
                self.tell(finding)
                new.append(finding)
        return new


@dataclass
class _Backwards:
    """Of one step.

    heard:     the losses; accumulates: gradients of one waited for the next; gave: the last one left gradients
    added:     parameters to whose gradients one has added, with which an optimizer had stepped
    continues: the last forward's inputs require gradients; is_through: so did those of the last backward; goes_through: of this one
    """

    heard: list[loss_weights.Heard | None] = field(default_factory=list)
    count: int = 0
    accumulates: bool = False
    gave: bool = False
    added: list[Parameter] = field(default_factory=list)
    continues: bool = False
    goes_through: bool = False
    is_through: bool = False


@dataclass(slots=True, eq=False)
class _Close:
    """What a close look at one step has found. A new watch begins with one.

    findings: what the other ranks have not been told
    data:     digests of the inputs of all micro-batches so far; None: without tensors
    gradient: a parameter, and a sample of its gradient at the end of the last backward
    losses:   digest of the gradients of the root's outputs so far
    random:   digest of the generators before the first forward; draws: forward has changed it
    left:     samples of gradients that backward found, with which an optimizer had stepped
    values:   of the parameter in ``gradient``; step: when they were taken
    has_dropped: its gradient was cleared before another backward
    backwards: the losses that were heard, how many there were, and whether gradients of one waited for the next
    """

    is_on: bool = True
    findings: list[Finding] = field(default_factory=list)
    data: list[int | None] = field(default_factory=list)
    gradient: tuple[Parameter, Tensor] | None = None
    losses: int = 0
    draws: bool = False
    is_clipped: bool = False
    random: int | None = None
    is_loss_finite: bool = True  # that of the last backward
    left: dict[Parameter, Tensor] = field(default_factory=dict)
    reduced_again: list[str] = field(default_factory=list)
    backwards: _Backwards = field(default_factory=_Backwards)
    has_dropped: bool = False
    values: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    step: int = 0


def _is_there(sample: Tensor | None) -> bool:
    return sample is not None and bool(sample.any())


def _differs(now: Tensor | None, before: Tensor) -> bool:
    return now is None or not torch.equal(now, before)


def _are_one(first: Optimizer, second: Optimizer) -> bool:
    """Whether one wraps the other, or is it."""
    return {id(group) for group in first.param_groups} == {id(group) for group in second.param_groups}


def _storage_of(tensor: Tensor) -> int:
    local = torch_dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if type(local) in (Tensor, nn.Parameter) else id(local)


def _some_values(param: Parameter) -> Tensor:
    """A few of this rank's values, at the places of ``sample_of``."""
    elements = param.local.detach().reshape(-1)
    return elements[:: max(1, elements.numel() // SAMPLED)].cpu().clone()


def _raise(finding: Finding) -> None:
    raise DoctorError(f"the doctor found something\n{finding}")


def _warn(finding: Finding) -> None:
    # Of the ranks that do not step, rank 0 may be one.
    warn(str(finding), DoctorWarning, ranks=(dist.get_rank(),) if finding.check == "step-on-some-ranks" else ())
