"""The gradient-scale certificate of a step of a program that runs as it is: nothing of it is changed, everything is heard.

What divides gradients is what ``doctor.gradient_scales`` measures. The weight of each token (or sample) follows from the gradient that
a loss of ``torch.nn.functional`` gets: of a mean over n tokens, the n-th part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..doctor import hearing
from ..doctor.finding import Finding, Report
from ..doctor.gradient_scale import Certificate, Probe, certificate, gradients_heard, received, reductions
from ..doctor.inspected import inspect
from ..doctor.patient import _living
from ..doctor.step_checks import digest_of
from ..inspect import exchange

_LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss")
"""By rank: of several kinds in a step the first one counts, the others are taken for additional terms."""


class Scales:
    """Hears one step, from its making to ``certificate``. All ranks make it between two steps."""

    def __init__(self, model: nn.Module) -> None:
        self.inspected = inspect(model, None, "gradient_scales")
        self._probes: dict[str, Probe] = {}
        self._num_losses = 0  # in each backward
        self._inputs: list[int | None] = []  # digests, of each forward
        self._accumulates = False  # gradients of a backward waited for the next
        self._undo = contextlib.ExitStack()
        self._computed = self._undo.enter_context(gradients_heard(self.inspected.params, self.inspected.units[0].contributes))
        self._received = received(())
        self._undo.callback(model.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        for unit in self.inspected.units:
            self._undo.callback(unit.on_backward_end(self._note))
        self._undo.callback(hearing.losses.listen(self._hear))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._received and all(param.sharded.grad is None for param in self.inspected.params):  # cleared: no step took them
            self._received = received(())
            self._num_losses = 0
            for heard in (self._probes, self._inputs, self._computed):
                heard.clear()
        self._inputs += [digest_of((args, kwargs))] if torch.is_grad_enabled() else []

    def _note(self) -> None:
        """A backward has ended: nobody has clipped or unscaled its gradients yet."""
        self._accumulates |= any(unit.accumulates() for unit in self.inspected.units)
        self._received = received(self.inspected.groups)

    def _hear(self, name: str, given: tuple[Any, ...], options: dict[str, Any], made: Tensor) -> None:
        """A loss was ``made`` of ``given``: an input and a target."""
        if name not in _LOSSES or len(given) > 2 or options.get("weight") is not None or not made.requires_grad:
            return
        target: Tensor = given[1] if len(given) > 1 else options["target"]
        probe = self._probes.setdefault(name, Probe())
        reduction, values = options.get("reduction", "mean"), made.detach()
        if reduction != "none":
            counts = not target.is_floating_point() and name in _LOSSES[:2]
            number = int((target != options.get("ignore_index", -100)).sum()) if counts else target.numel()
            values = torch.ones(number, device=made.device)  # no token's loss is known to be zero
        share = max(values.numel(), 1) if reduction == "mean" else 1
        is_zero = values == 0

        def hear(grad: Tensor) -> None:
            if self.inspected.units[0].contributes():
                self._num_losses += 1
                probe._hear((grad / share).expand_as(values), is_zero)

        made.register_hook(hear)  # type: ignore[no-untyped-call]

    def certificate(self) -> Certificate:
        """Collective: yes, over all ranks of the job."""
        self._undo.close()
        divisors = reductions(self.inspected.groups, self._computed, self._received)
        probe = next((self._probes[name] for name in _LOSSES if name in self._probes and self._probes[name].count), Probe())
        scale = next((each.get_scale() for each in _living(torch.amp.GradScaler)), 1.0)  # of the loss, and so of all gradients
        heard = probe.count, probe.total / scale, probe.num_zero, probe.lowest / scale, probe.highest / scale
        of_batches = self._accumulates and self._num_losses <= len(set(self._inputs))
        everyone = exchange((heard, self._num_losses > 1 and not of_batches))
        found = certificate(self.inspected, divisors, [each for each, _ in everyone], None, 0.02)
        is_averaged = all(each is None or abs(each / len(self.inspected.ranks) - 1) < 0.02 for each in divisors.values())
        may_be_tasks = is_averaged and any(several for _, several in everyone)
        return replace(found, report=Report(tuple(_certain(found.report, may_be_tasks))))


def _certain(findings: Sequence[Finding], may_be_tasks: bool) -> Iterator[Finding]:
    """Weights of tokens are for ``doctor.watch`` to judge, which knows what is a micro-batch. may_be_tasks: there are several losses,
    not known to be of micro-batches: that they do not weigh 1 in sum is no fault of tasks.
    """
    for each in findings:
        if each.check == "gradient-scale" and may_be_tasks:
            why = "that is right for losses of several tasks, which have a weight of their own, and wrong for those of micro-batches"
            yield replace(each, severity="note", why=why, fix="divide the losses of micro-batches by their number")
        elif each.check != "token-weights":
            yield each
