"""Faults that one step shows: gradients, micro-batches, clipping, data. Findings are made here; ``watching.py`` knows when."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..inspect import Parameter, Unit, find_tensors
from .finding import Finding
from .learning import Settings
from .loss_weights import Heard
from .replicas import digest

USED_OUTSIDE = Finding(
    "used-outside-forward",
    "warning",
    "{count} parameters are used outside of the forward of the module that they were sharded with",
    "there they are shards, or memory that is freed: each rank computes with its own piece, and that gradient is not averaged",
    "use them inside of the module's forward (register_fsdp_forward_method for other methods), shard the module that uses them "
    "together with theirs (fully_shard([a, b])), or take full_tensor() where all ranks compute the same",
)
CLIPPED_LATE = Finding(
    "clip-without-effect",
    "warning",
    "gradients are clipped after the optimizer's step, and before the next backward",
    "the step used them as they were",
    "clip between backward and optimizer.step()",
)
CLIPS_NOTHING = Finding(
    "clip-without-effect",
    "warning",
    "clip_grad_norm_ got parameters, and none of them has a gradient",
    "it changes nothing: they are whole parameters from before fully_shard, a generator that was read before, or were cleared",
    "pass model.parameters(), listed after fully_shard, between backward and optimizer.step()",
)
SAME_DATA = Finding(
    "same-data-on-every-rank",
    "warning",
    "{count} data-parallel ranks had the same inputs in two steps",
    "the step costs as much as with different data, and learns from a fraction of it",
    "give each rank its part: DistributedSampler(rank=..., num_replicas=...), or a seed for shuffling that has the rank in it",
)
DROPPED = Finding(
    "gradients-dropped",
    "warning",
    "in two steps gradients of a backward were cleared before an optimizer stepped with them",
    "the step uses those of the last micro-batch alone, and the others cost time for nothing",
    "call zero_grad() after optimizer.step(), and not between micro-batches",
)
STEPPED_AGAIN = Finding(
    "stepped-again",
    "error",
    "the optimizer steps {count} parameters again with gradients with which it has stepped, and no backward came between",
    "each gradient is applied twice, and the optimizer's averages count it twice",
    "call optimizer.step() once after the backwards of a batch",
)


def missing_gradients(params: Iterable[Parameter], num_steps: int) -> Iterator[Finding]:
    """params: without a gradient in all ``num_steps``"""
    names = tuple(param.fqn for param in params if param.sharded.requires_grad)
    if names:
        yield Finding(
            "gradient-never-came",
            "warning",
            f"{len(names)} parameters require a gradient, and got none in {num_steps} steps",
            "they do not train, although ranks gather and reduce them and the optimizer keeps their state; forward may leave them "
            "out by mistake (detach, no_grad, a branch that never runs)",
            "use them in forward, or freeze them with requires_grad_(False); experts that seldom run need more patience=",
            names,
        )


def accumulation_switches(units: Sequence[Unit]) -> Iterator[Finding]:
    """At the end of a backward: switches that some modules have and others do not, or that change nothing."""
    reduced = [unit for unit in units if unit.groups]
    off = [unit.name or "the root" for unit in reduced if not unit.reduces()]
    if off and len(off) < len(reduced):
        yield Finding(
            "accumulation-switch-on-a-part",
            "warning",
            f"gradient sync is off for {len(off)} of {len(reduced)} modules in one backward",
            "the others communicate in every micro-batch, which the switch should have saved",
            "call set_requires_gradient_sync on the root, with recurse=True, or use fsdp2.accumulate(model, last=...)",
            tuple(off),
        )
    idle = [
        unit.name or "the root"
        for unit in reduced
        if unit.reduces() and not unit.all_reduces() and all(group.replicate_group is None for group in unit.groups)
    ]
    if idle:
        yield Finding(
            "accumulation-switch-without-effect",
            "warning",
            f"set_requires_all_reduce(False) is set on {len(idle)} modules, which have no replicas",
            "each micro-batch communicates as before: without a replicate axis there is no all-reduce to skip",
            "call set_requires_gradient_sync(False) for micro-batches that are not the last, or use fsdp2.accumulate(model, last=...)",
            tuple(idle),
        )


def gradients_left(units: Sequence[Unit]) -> Iterator[Finding]:
    """Findings before an optimizer's step: gradients that it will not see."""
    waiting = tuple(param.fqn for unit in units for group in unit.groups if group.has_unreduced() for param in group.params)
    if waiting:
        yield Finding(
            "step-before-reduction",
            "error",
            f"the optimizer steps while gradients of {len(waiting)} parameters wait to be reduced",
            "it steps with those of earlier micro-batches, or with none; the rest is added to the next step's",
            "switch gradient sync on before the last backward: set_requires_gradient_sync(True), or fsdp2.accumulate(model, last=True)",
            waiting,
        )
    outside = tuple(
        param.fqn
        for unit in units
        for group in unit.groups
        if not group.has_unreduced()
        for param in group.params
        if (whole := param.unsharded()) is not None and whole.grad is not None
    )
    if outside:
        yield USED_OUTSIDE.of(outside)


@dataclass(frozen=True)
class Scale:
    """By which factor this rank's piece of a parameter's gradient changed between backward and the optimizer's step.

    rounding: the relative error that the gradient's dtype adds to the factor
    """

    param: str
    factor: float
    rounding: float


@dataclass(frozen=True)
class Observed:
    """The facts of one rank on one step, for all ranks to compare.

    ranks: those that train on different data, this one among them
    data:  a digest of the root's inputs; None: there were none
    scale: None: this rank has no gradient that tells, or something else than a factor changed it
    losses:   a digest of what backward hands to the root's outputs: where inputs are the same and targets are not, these differ
    random:   a digest of the generators before forward, if it draws from them
    is_zero:  all gradients are zero
    settings: of the optimizers
    metric:   that a ReduceLROnPlateau was given since the last exchange
    missing:  names of parameters without a gradient
    heard:    mean losses of all micro-batches; None: other things than one of them went into a backward
    """

    ranks: tuple[int, ...]
    data: int | None
    scale: Scale | None
    losses: int = 0
    random: int | None = None
    is_zero: bool = False
    settings: Settings = field(default_factory=dict)
    metric: float | None = None
    missing: tuple[str, ...] = ()
    heard: tuple[Heard, ...] | None = None


def same_data(by_rank: Sequence[Observed]) -> set[tuple[int, ...]]:
    """Sets of ranks that should train on different data, and had the same in this step."""
    return {
        ranks
        for ranks, seen in peers(by_rank).items()
        if seen[0].data is not None
        and len({each.data for each in seen}) == 1
        # Ranks that draw different random numbers have different outputs even for the same targets.
        and (len({each.random for each in seen}) > 1 or len({each.losses for each in seen}) == 1)
    }


def same_random(by_rank: Sequence[Observed]) -> set[tuple[int, ...]]:
    """Sets of ranks that had different data in this step, and drew the same random numbers for it."""
    return {
        ranks
        for ranks, seen in peers(by_rank).items()
        if seen[0].random is not None and len({each.random for each in seen}) == 1 and len({each.data for each in seen}) > 1
    }


def all_zero(by_rank: Sequence[Observed]) -> set[tuple[int, ...]]:
    """Sets of ranks that train the same model, and have zero gradients only."""
    return {ranks for ranks, seen in peers(by_rank, 1).items() if all(each.is_zero for each in seen)}


def peers(by_rank: Sequence[Observed], least: int = 2) -> dict[tuple[int, ...], list[Observed]]:
    """What ranks that train the same model have seen, in sets of ``least`` or more."""
    sets = dict.fromkeys(seen.ranks for seen in by_rank if len(seen.ranks) >= least)
    return {ranks: [by_rank[rank] for rank in ranks] for ranks in sets}


def scale_findings(by_rank: Sequence[Observed]) -> Iterator[Finding]:
    """Pieces of one parameter's gradient that ranks have scaled differently: somebody has clipped by norms of local shards.

    Ranks that looked at different parameters are not compared: a program may give each parameter a factor of its own.
    """
    compared = {(seen.ranks, seen.scale.param) for seen in by_rank if seen.scale is not None}
    for ranks, param in sorted(compared):
        seen_by = {rank: scale for rank in ranks if (scale := by_rank[rank].scale) is not None and scale.param == param}
        scales = {rank: scale.factor for rank, scale in seen_by.items()}
        tolerance = max(1e-3, *(scale.rounding for scale in seen_by.values()))
        if max(scales.values()) - min(scales.values()) > tolerance * max(scales.values()):
            shown = ", ".join(f"{scale:.3g} on rank {rank}" for rank, scale in list(scales.items())[:4])
            yield Finding(
                "clip-on-local-shards",
                "error",
                f"gradients were scaled by {shown} between backward and the optimizer's step",
                "each rank clips by the norm of its own shards: the pieces of one parameter are scaled differently, and the model that "
                "trains depends on the number of ranks",
                "use torch.nn.utils.clip_grad_norm_ or fsdp2.clip_grad_norm_ on the parameters, not on local tensors",
                ranks=tuple(scales),
            )


def some_miss(by_rank: Mapping[int, Observed]) -> Iterator[Finding]:
    """by_rank: of ranks that train the same model"""
    for names in dict.fromkeys(seen.missing for seen in by_rank.values()):
        lacking = tuple(rank for rank, seen in by_rank.items() if set(names) <= set(seen.missing))
        some = tuple(name for name in names if any(name not in seen.missing for seen in by_rank.values()))
        if some:
            yield Finding(
                "gradients-on-some-ranks",
                "error",
                f"the optimizer steps without gradients of {len(some)} parameters, which other ranks have",
                "each rank steps its own shard: on these ranks that part of the parameters stays as it is",
                "remove what clears .grad on some ranks alone, between backward and optimizer.step()",
                some,
                lacking,
            )


def digest_of(arguments: Any) -> int | None:
    """A digest of all tensors in ``arguments``; None if there are none."""
    found: list[Tensor] = []
    find_tensors(arguments, found)
    return zlib.crc32(repr([digest(tensor) for tensor in found]).encode()) if found else None


SAMPLED = 4096
"""Elements of a gradient that a rank keeps from backward to the optimizer's step."""


def sample_of_gradients(params: Iterable[Parameter]) -> tuple[Parameter, Tensor] | None:
    """A parameter, and a sample of its gradient whose magnitudes differ; None if no parameter has one.

    Where all magnitudes are equal, a factor cannot be told from ``clip_grad_value_``.
    """
    for param in params:
        sample = sample_of(param)
        if sample is not None:
            magnitudes = sample.abs()
            magnitudes = magnitudes[magnitudes != 0]
            if magnitudes.numel() > 1 and magnitudes.max() > 1.01 * magnitudes.min():
                return param, sample
    return None


def sample_of(param: Parameter) -> Tensor | None:
    """Elements of this rank's piece of the gradient, the same at each call; None if it has no gradient, or one that is not finite."""
    grad = param.grad
    if grad is None:
        return None
    elements = grad.reshape(-1)
    sample = elements[:: max(1, elements.numel() // SAMPLED)].cpu()
    sample = sample.to(torch.promote_types(sample.dtype, torch.float64), copy=True)
    return sample if sample.isfinite().all() else None


def scale_since(param: Parameter, before: Tensor) -> Scale | None:
    """None: the gradient is what no single factor makes of ``before``, so noise, a mask or ``clip_grad_value_`` changed it."""
    after, grad = sample_of(param), param.grad
    if after is None or grad is None or not after.any():
        return None
    factor = (after.abs().sum() / before.abs().sum()).item()
    limits = torch.finfo(grad.dtype)
    rounding = 4 * limits.eps  # a program may scale twice, for a loss scaler and to clip
    expected = factor * before
    allowed = rounding * expected.abs() + 4 * limits.eps * limits.tiny
    return Scale(param.fqn, factor, rounding) if ((after - expected).abs() <= allowed).all() else None
