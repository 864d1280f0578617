"""The gradient-scale certificate: the number that divides each parameter's gradient, and whether it is the declared one.

A step of the user's runs with two probes. One hears each gradient as autograd computes it, before anything is reduced; it keeps a few
projections on random signs, whose sum over ranks and micro-batches is compared with what the parameter gets: the quotient is what
collectives and hooks divide by. The other hears the weight of each token's loss. Together: the divisor of the sum over all tokens.

Worked example, 2 ranks with 3 tokens each, the loss their mean, fully_shard's average over ranks:

    weight of a token 1/3, reduction 2: effective divisor 6, the number of tokens
    experts whose gradients already have the tokens of both ranks, and that only their one holder divides: 3, and named
"""

from __future__ import annotations

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import POSITIVE
from ..errors import ArgumentError, got
from ..inspect import Group, Parameter, during, exchange, local_of
from ..torch_names import torch_dtensors
from .finding import Finding, Report, report_of
from .inspected import Inspected, inspect
from .loss_weights import token_weights

_NUM_PROJECTIONS = 4

Projections = defaultdict[Parameter, Tensor]
"""A few projections of gradients on random signs, (4,), fp64; zeros where there is none."""

_Heard = tuple[int, float, int, float, float]
"""Of one rank's losses: how many have a weight, the sum of weights, how many of them are zero, the lowest and the highest weight."""


@dataclass(frozen=True)
class Certificate:
    """The divisors of one step.

    divisors:   of each parameter's gradient, by name; None: it got no gradient
    declared:   what each should be
    num_tokens: losses that counted, over all data-parallel ranks; 0: the step did not show them to the probe. Losses that are zero, as
                those of padding are, count only where the gradients are divided by the number of all
    report:     what differs
    """

    divisors: Mapping[str, float | None]
    declared: Mapping[str, float]
    num_tokens: int
    report: Report


class Probe:
    """Hears the weights of per-token losses; returns them as they are."""

    def __init__(self) -> None:
        self.count, self.total, self.num_zero = 0, 0.0, 0
        self.lowest, self.highest = float("inf"), 0.0

    def __call__(self, losses: Tensor) -> Tensor:
        if losses.requires_grad:
            is_zero = losses.detach() == 0
            losses.register_hook(lambda weights: self._hear(weights, is_zero))  # type: ignore[no-untyped-call]
        return losses

    def _hear(self, weights: Tensor, is_zero: Tensor) -> None:
        heard = weights.detach().double().abs()
        self.num_zero += int(((heard > 0) & is_zero).sum())
        heard = heard[heard > 0]  # masked targets are no tokens
        if heard.numel() > 0:
            self.count += heard.numel()
            self.total += heard.sum().item()
            self.lowest = min(self.lowest, heard.min().item())
            self.highest = max(self.highest, heard.max().item())


def gradient_scales(
    model: nn.Module,
    step: Callable[[Probe], Any],
    *,
    declared: float | Callable[[str], float] | None = None,
    tolerance: float = 0.02,
) -> Certificate:
    """Find the number that divides each parameter's gradient in ``step``, and the gradients where it differs from the declared one.

    step:       runs forwards and backwards, without the optimizer, and passes each loss of a token (or sample) through the probe
                before it averages; one that does not is measured without the loss's own weights
    declared:   the divisor of the sum over tokens, for all parameters or by name; None: the number of tokens on all data-parallel
                ranks of the root, with or without those whose loss is zero, so that the gradient is that of their mean; without a probe
                the number of these ranks
    tolerance:  relative; bf16 gradients need some
    Collective: yes; gradients are cleared before and after
    Raises:     ModuleError if ``model`` is not sharded; ArgumentError for another wrong argument

    Example:
        def step(probe):
            for batch in x.chunk(2):  # all micro-batches of one optimizer step
                losses = model(batch).square().mean(-1)
                (probe(losses).mean() / 2).backward()


        fsdp2.doctor.gradient_scales(model, step).divisors["0.0.weight"]  # 8.0: 4 samples on each of 2 ranks
    """
    _check_arguments(step, declared, tolerance)
    inspected = inspect(model, None, "gradient_scales")
    for unit in inspected.units:  # so that the unsharded parameters exist
        sharded: Any = unit.modules[0]
        sharded.unshard()
        sharded.reshard()
    model.zero_grad()
    probe = Probe()
    with gradients_heard(inspected.params) as computed:
        step(probe)
    divisors = reductions(inspected.groups, computed, received(inspected.groups))
    model.zero_grad()
    heard = probe.count, probe.total, probe.num_zero, probe.lowest, probe.highest
    everyone = exchange(heard)
    return certificate(inspected, divisors, everyone, declared, tolerance)


@contextlib.contextmanager
def gradients_heard(params: Iterable[Parameter], counts: Callable[[], bool] = lambda: True) -> Iterator[Projections]:
    """Inside, the projections of this rank's gradients of ``params`` are added up as autograd computes them, while ``counts()``."""
    computed: Projections = defaultdict(lambda: torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64, device="cpu"))
    with contextlib.ExitStack() as undo:
        for param in params:
            whole = param.unsharded()
            if whole is not None and param.sharded.requires_grad:

                def hear(grad: Tensor, param: Parameter = param) -> None:
                    if counts():
                        computed[param] += _projections(param, grad, cut=False)

                undo.callback(whole.register_hook(hear).remove)  # type: ignore[no-untyped-call]
        yield computed


def received(groups: Sequence[Group]) -> Projections:
    """Of this rank's pieces of the reduced gradients, as they are now. Collective: no"""
    found: Projections = defaultdict(lambda: torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64, device="cpu"))
    for param in (param for group in groups for param in group.params):
        share = param.num_shards if param.dim is None else 1  # what every rank has whole
        if param.sharded.grad is not None:
            found[param] = _projections(param, param.sharded.grad, cut=True) / share
    return found


def _check_arguments(step: Any, declared: Any, tolerance: Any) -> None:
    caller = "gradient_scales"
    if not callable(step):
        raise ArgumentError(got(caller, "step", step), expected="a function that takes the probe", fix="see docs/doctor.md")
    if not (declared is None or callable(declared) or POSITIVE.holds(declared)):
        raise ArgumentError(
            got(caller, "declared", declared),
            expected="a divisor above 0, or a function from a parameter's name to one",
            fix="leave it out: then it is the number of tokens of all data-parallel ranks",
        )
    if not POSITIVE.holds(tolerance):
        raise ArgumentError(got(caller, "tolerance", tolerance), expected="a relative error above 0", fix="tolerance=0.02")


def _projections(param: Parameter, grad: Tensor, *, cut: bool) -> Tensor:
    """(4,): of a whole gradient, or of this rank's piece of it, on random signs that are the same on all ranks."""
    local = torch_dtensors.waited_for(local_of(grad))
    found = []
    for number in range(_NUM_PROJECTIONS):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{param.fqn} {number}".encode()))
        signs = torch.randint(0, 2, param.shape, generator=generator, dtype=torch.int8, device="cpu")
        signs = param.piece_of(signs) if cut else signs
        found.append(((2 * signs - 1).to(local.device) * local.detach().double()).sum().cpu())
    return torch.stack(found)


def reductions(groups: Sequence[Group], computed: Projections, got: Projections) -> dict[str, float | None]:
    """What lies between the sum of all computed gradients and what each parameter got. Collective: yes, over each group's ranks."""
    found: dict[str, float | None] = {}
    for group in groups:
        summed = _over(group, torch.stack([computed[param] for param in group.params]), replicas=True)
        reduced = _over(group, torch.stack([got[param] for param in group.params]), replicas=False)
        for param, ours, expected in zip(group.params, reduced, summed, strict=True):
            along = (ours * expected).sum().item()
            found[param.fqn] = (expected * expected).sum().item() / along if along else None
    return found


def _over(group: Group, numbers: Tensor, *, replicas: bool) -> Tensor:
    there = numbers.to(group.device)
    for process_group in (group.shard_group, group.replicate_group if replicas else None):
        if process_group is not None:
            with during("all-reduce of projections", process_group, there):
                dist.all_reduce(there, group=process_group)
    return there.cpu()


def certificate(
    inspected: Inspected,
    divisors: dict[str, float | None],
    everyone: Sequence[_Heard],
    declared: float | Callable[[str], float] | None,
    tolerance: float,
) -> Certificate:
    here = everyone if len(everyone) == 1 else [everyone[rank] for rank in inspected.ranks]
    num_tokens = sum(count for count, *_ in here)
    num_zero = sum(zero for _, _, zero, *_ in here)
    findings: list[Finding] = []
    if num_tokens:
        weight = sum(total for _, total, *_ in here) / num_tokens
        divisors = {name: None if each is None else each / weight for name, each in divisors.items()}
        findings += _uneven(here, tolerance)
        if num_zero < num_tokens and not _are_divided_by(num_tokens, divisors, tolerance):
            num_tokens -= num_zero  # padding
    usual = float(num_tokens or len(inspected.ranks))
    wanted = {name: declared(name) if callable(declared) else usual if declared is None else declared for name in divisors}
    wrong: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, divisor in divisors.items():
        if divisor is not None and abs(divisor / wanted[name] - 1) > tolerance:
            wrong[f"{divisor:.4g}", f"{wanted[name]:.4g}"].append(name)
    for (found, expected), names in wrong.items():
        findings.append(
            Finding(
                "gradient-scale",
                "error",
                f"the gradients of {len(names)} parameters are divided by {found}, and not by {expected}",
                f"they are {float(expected) / float(found):.3g} times the declared ones: these parameters train with another "
                "learning rate than the rest, or clipping scales all by their norm",
                "for experts and context parallelism call set_gradient_divide_factor with the number of ranks whose tokens their "
                "gradients have; for all parameters divide the loss by the micro-batches, or by the tokens of all ranks",
                tuple(names),
                tuple(inspected.ranks),
            )
        )
    return Certificate(divisors, wanted, num_tokens, report_of([findings]))


def _are_divided_by(number: int, divisors: Mapping[str, float | None], tolerance: float) -> bool:
    """Whether most gradients are."""
    fitting = [abs(each / number - 1) <= tolerance for each in divisors.values() if each is not None]
    return 2 * sum(fitting) > len(fitting)


def _uneven(here: Sequence[_Heard], tolerance: float) -> Iterator[Finding]:
    lowest = min(low for count, *_, low, _ in here if count)
    highest = max(high for *_, high in here)
    if highest > lowest * (1 + tolerance):
        yield token_weights(f"{lowest:.4g}", f"{highest:.4g}")
