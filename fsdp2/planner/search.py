"""Which settings fit a memory limit, and of these the fastest: ``fsdp2 plan --search``, and ``search``.

Each candidate is rehearsed. The search goes from the setting that was asked for to better ones, one choice at a time: strategy,
wrapping, checkpointing, prefetch depth, and into how many micro-batches a rank's sequences are split. How many these are stays.
It ends where no single choice is better, which need not be the best of all combinations. Step times are a model (docs/step_clock.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ..errors import ArgumentError, FSDPError, got
from ..testing.clock.cards import Card
from ..wrap import by_class
from .api import card_of, plan_of
from .rehearsal import Setting
from .result import Plan
from .text import Table, gb
from .workload import Workload, workload_of

LINEAR_LAYERS = by_class("Linear", "Embedding")
"""Small groups: each linear layer by itself. They need less memory at a time, and more collectives."""


@dataclass(frozen=True)
class Proposal:
    """changes: by the choice's name, what it is instead of what was asked for"""

    plan: Plan
    changes: dict[str, str]

    @property
    def step(self) -> float:
        """Seconds, by a model."""
        assert self.plan.duration is not None
        return self.plan.duration.step

    @property
    def peak(self) -> int:
        return self.plan.memory.peak.nbytes


@dataclass(frozen=True)
class Found:
    """asked: the setting as it was asked for; proposals: that fit, the fastest first; limit: bytes; num_tried: settings"""

    asked: Proposal
    proposals: tuple[Proposal, ...]
    limit: float
    num_tried: int

    @property
    def table(self) -> Table:
        rows = [("as asked", *_costs(self.asked, self.limit))]
        rows += [(_words(each.changes), *_costs(each, self.limit)) for each in self.proposals if each.changes]
        return Table(
            f"{len(self.proposals)} settings within {gb(self.limit)}, the fastest first, of {self.num_tried} that were tried",
            ("change", "step, ms", "MFU", "peak", "fits"),
            tuple(rows),
            "step times are a model (docs/step_clock.md)"
            if self.proposals
            else "nothing that was tried fits: take more ranks, or offload",
        )


def search(
    model: nn.Module | Workload,
    setting: Setting,
    card: str | Card | None,
    *,
    memory_limit: float | None = None,
    ranks_per_host: int = 8,
    keep: int = 5,
) -> Found:
    """Settings near ``setting`` that fit ``memory_limit``, the best predicted time first; each plan is ``plan_of`` that setting.

    memory_limit: bytes of a rank; None: the card's memory, less a tenth for what allocators and libraries take
    keep:         how many to propose
    Collective:   no
    Raises:       an FSDPError for wrong arguments, and what ``plan`` raises for ``setting``
    """
    chosen = card_of(card, setting)
    if chosen is None:
        raise ArgumentError(got("search", "card", card), expected="a card, by which times are predicted", fix='card="h100"')
    given: Any = memory_limit
    if given is not None and (isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0):
        raise ArgumentError(got("search", "memory_limit", memory_limit), expected="bytes, more than 0", fix="memory_limit=80e9")
    workload = model if isinstance(model, Workload) else workload_of(model)
    limit = 0.9 * chosen.memory_nbytes if memory_limit is None else memory_limit
    plan = partial(plan_of, workload, ranks_per_host=ranks_per_host, card=chosen)
    return searched(plan, setting, limit, ranks_per_host, keep)


def searched(plan: Callable[[Setting], Plan], setting: Setting, limit: float, ranks_per_host: int, keep: int) -> Found:
    """The search itself. plan: of a setting; it may raise an FSDPError for what cannot be"""

    def rank_of(proposal: Proposal) -> tuple[bool, float]:
        """Choices that fit, by their time; others by their bytes."""
        fits = proposal.peak <= limit
        return not fits, proposal.step if fits else proposal.peak

    asked = best = Proposal(plan(setting), {})
    tried = {_key(setting): asked}
    while True:
        here = best
        for other in _neighbours(here.plan.setting, setting, ranks_per_host, fits=here.peak <= limit):
            if _key(other) in tried:
                continue
            with contextlib.suppress(FSDPError):  # a mesh that ranks cannot form
                found = tried[_key(other)] = Proposal(plan(other), _changes(setting, other))
                best = min(best, found, key=rank_of)
        if best is here:
            break
    fitting = sorted((each for each in tried.values() if each.peak <= limit), key=rank_of)
    return Found(asked, tuple(fitting[:keep]), limit, len(tried))


def _neighbours(setting: Setting, asked: Setting, ranks_per_host: int, fits: bool) -> Iterator[Setting]:
    """Settings with one other choice."""
    for strategy in ("zero3", "hsdp", "zero2", "ddp"):
        hybrid = strategy == "hsdp"
        if not hybrid or (setting.world_size > ranks_per_host and setting.world_size % ranks_per_host == 0):
            yield replace(setting, strategy=strategy, shard_size=ranks_per_host if hybrid else None)
    yield replace(setting, strategy=asked.strategy, shard_size=asked.shard_size)
    for wrap in (asked.wrap, "auto"):
        yield replace(setting, wrap=wrap)
    if not fits:  # small groups save memory, and cost launches
        yield replace(setting, wrap=LINEAR_LAYERS)
    for checkpointing in (asked.checkpointing, "none", "full"):
        yield replace(setting, checkpointing=checkpointing)
    for prefetch in {max(setting.prefetch - 1, 0), setting.prefetch + 1}:
        yield replace(setting, prefetch=prefetch)
    sequences = setting.batch * setting.micro_batches
    batches = [batch for batch in range(1, sequences + 1) if sequences % batch == 0]
    at = batches.index(setting.batch)
    for batch in batches[max(at - 1, 0) : at + 2]:
        yield replace(setting, batch=batch, micro_batches=sequences // batch)


def _key(setting: Setting) -> tuple[object, ...]:
    shown = setting.strategy, setting.shard_size, setting.checkpointing, setting.prefetch, setting.batch
    return (*shown, id(setting.wrap) if callable(setting.wrap) else repr(setting.wrap))


def _changes(asked: Setting, setting: Setting) -> dict[str, str]:
    changes = {}
    for name in ("strategy", "checkpointing", "prefetch"):
        if getattr(asked, name) != getattr(setting, name):
            changes[name] = str(getattr(setting, name))
    if setting.wrap is not asked.wrap and setting.wrap != asked.wrap:
        changes["wrap"] = "each linear layer" if setting.wrap is LINEAR_LAYERS else str(setting.wrap)
    if setting.batch != asked.batch:
        changes["micro-batches"] = f"{setting.micro_batches} of {setting.batch}"
    return changes


def _words(changes: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items())


def _costs(proposal: Proposal, limit: float) -> tuple[str, ...]:
    assert proposal.plan.duration is not None
    fits = "yes" if proposal.peak <= limit else "no"
    return f"{proposal.step * 1e3:,.0f}", f"{proposal.plan.duration.mfu:.0%}", gb(proposal.peak), fits
