"""Find the fastest settings that fit a memory limit: ``fsdp2 search``, and ``search``.

The search rehearses each candidate. It starts from the given setting and changes one choice at a time: strategy, wrapping,
checkpointing, prefetch depth, and the number of micro-batches into which a rank's sequences are split (their total stays). It ends
when no single change is better, so the result need not be the best combination. Step times are a model (docs/step_clock.md).

Three shortcuts. It does not rehearse a candidate whose parameters and optimizer state alone exceed the limit. Once a setting fits, it
does not rehearse one that can't be faster: with more recomputation, or with another strategy when nothing waits for communication.
And it leaves out the check by a third rehearsal (see ``repetition``) for a candidate that fits worse, or is slower, than earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..arguments import POSITIVE, require
from ..errors import ArgumentError, FSDPError, got
from ..printable import in_bytes
from ..state_bytes import expected_state_bytes
from ..strategy import StrategyName
from ..testing.clock.cards import Card
from ..wrap import by_class
from .api import card_of, plan_of
from .proposals import Dropped, Found, Proposal
from .result import Plan
from .setting import Setting
from .workload import Workload, workload_of

LINEAR_LAYERS = by_class("Linear", "Embedding")
"""Small groups: each linear layer by itself. They need less memory at a time, and more collectives."""

GAIN = 2e-3
"""The share of a step that a change must save to be adopted. Predicted times of many blocks are off by half of that."""

Planned = Callable[[Setting, Callable[[Plan], bool]], Plan]
"""Plans a setting. The second argument says which plans the search needs to be exact."""


def search(
    model: nn.Module | Workload,
    setting: Setting,
    card: str | Card | None,
    *,
    memory_limit: float | None = None,
    keep: int = 5,
    on_candidate: Callable[[int, dict[str, str]], None] = lambda number, changes: None,
) -> Found:
    """Settings near ``setting`` that fit ``memory_limit``, the best predicted time first; each plan is ``plan_of`` that setting.

    memory_limit: bytes of a rank; None: the card's memory, less a tenth for what allocators and libraries take
    keep:         how many to propose
    on_candidate: is called before each candidate, with how many were tried before it and what it changes
    Collective:   no
    Raises:       an FSDPError for wrong arguments, and what ``plan`` raises for ``setting``
    """
    chosen = card_of(card, setting)
    if chosen is None:
        raise ArgumentError(got("search", "card", card), expected="a card, by which times are predicted", fix='card="h100"')
    require("search", POSITIVE.or_none, memory_limit=memory_limit)
    workload = model if isinstance(model, Workload) else workload_of(model)
    limit = 0.9 * chosen.memory_nbytes if memory_limit is None else memory_limit

    def plan(candidate: Setting, is_of_interest: Callable[[Plan], bool]) -> Plan:
        return plan_of(workload, candidate, chosen, is_of_interest)

    return searched(plan, setting, limit, keep, on_candidate)


def searched(
    plan: Planned,
    setting: Setting,
    limit: float,
    keep: int,
    on_candidate: Callable[[int, dict[str, str]], None] = lambda number, changes: None,
) -> Found:
    """The search itself. plan: of a setting; it may raise an FSDPError for what cannot be"""

    def rank_of(proposal: Proposal) -> tuple[bool, float]:
        """Choices that fit, by their time; others by their bytes."""
        fits = proposal.peak <= limit
        return not fits, proposal.step if fits else proposal.peak

    def is_as_fast(found: Proposal, other: Proposal) -> bool:
        return max(found.peak, other.peak) <= limit and found.step > (1 - GAIN) * other.step

    def adds_nothing(found: Proposal, others: Iterable[Proposal]) -> bool:
        """Whether a part of the changes alone is as fast, and needs no more memory."""
        return any(
            other.changes.items() < found.changes.items() and is_as_fast(found, other) and other.peak <= found.peak for other in others
        )

    asked = best = Proposal(plan(setting, lambda _: True), {})
    tried = {_key(setting): asked}
    dropped: dict[tuple[object, ...], Dropped] = {}

    def is_of_interest(planned: Plan) -> bool:
        """Whether it may be the next step of the search, or be proposed."""
        found = Proposal(planned, {})
        if found.peak > limit:
            return rank_of(found) < rank_of(best)
        faster = [each for each in tried.values() if each.peak <= limit and each.step < found.step]
        return sum(not adds_nothing(each, faster) for each in faster) < keep

    while True:
        here = best
        for other in _neighbors(here.plan.setting, setting, fits=here.peak <= limit):
            key, changes = _key(other), _changes(setting, other)
            if key in tried or key in dropped or (here.peak <= limit and not _may_be_faster(here.plan, other)):
                continue
            on_candidate(len(tried) + len(dropped), changes)
            kept = _least_kept(asked.plan, other)
            if kept > limit and (best.peak <= limit or kept > best.peak):
                dropped[key] = Dropped(changes, f"parameters and optimizer state alone take {in_bytes(kept)}")
                continue
            try:
                found = tried[key] = Proposal(plan(other, is_of_interest), changes)
            except FSDPError as error:  # a mesh that ranks cannot form
                dropped[key] = Dropped(changes, str(error).splitlines()[0])
                continue
            if rank_of(found) < rank_of(best) and not is_as_fast(found, best):
                best = found
        if best is here:
            break
    ranked = sorted(tried.values(), key=rank_of)
    fitting = [each for each in ranked if each.peak <= limit]
    proposals = [each for each in fitting if not adds_nothing(each, fitting)][:keep]
    return Found(
        asked=asked.compared_with(proposals[0]) if proposals else asked,
        proposals=tuple(each.compared_with(proposals[0]) for each in proposals),
        limit=limit,
        num_tried=len(tried) + len(dropped),
        num_slower=len(fitting) - len(proposals),
        dropped=(*(_too_large(each) for each in ranked[len(fitting) :] if each.changes), *dropped.values()),
    )


def _least_kept(asked: Plan, setting: Setting) -> float:
    """Bytes of a rank's parameters without padding, and of states in the proportion that ``asked`` has."""
    if setting.offload in (True, "disk"):
        return 0.0
    # A user's own optimizer may keep states that no rank shards.
    has_states = isinstance(setting.optimizer, str) and not setting.offload and asked.state.master > 0
    states = asked.state.optimizer / asked.state.master if has_states else 0.0
    ranks, node = setting.world_size, setting.node_size
    kept = (
        expected_state_bytes(setting.strategy, group.numel, world_size=ranks, shard_size=node, dtype=group.dtype)
        for group in asked.groups
    )
    return sum(each.master for each in kept) * (1 + states)


def _too_large(proposal: Proposal) -> Dropped:
    peak = proposal.plan.memory.peak
    return Dropped(proposal.changes, f"needs {in_bytes(peak.nbytes)}, in {peak.phase} of {peak.where or 'the model'}")


def _neighbors(setting: Setting, asked: Setting, fits: bool) -> Iterator[Setting]:
    """Settings with one other choice."""
    strategies: tuple[StrategyName, ...] = ("zero3", "hsdp", "zero2", "ddp")
    node = setting.ranks_per_host
    for strategy in strategies:
        hybrid = strategy == "hsdp"
        if not hybrid or (setting.world_size > node and setting.world_size % node == 0):
            yield replace(setting, strategy=strategy, shard_size=node if hybrid else None)
    yield replace(setting, strategy=asked.strategy, shard_size=asked.shard_size)
    for wrap in (asked.wrap, "auto"):
        yield replace(setting, wrap=wrap)
    if not fits:  # small groups save memory, and cost launches
        yield replace(setting, wrap=LINEAR_LAYERS)
    for checkpointing in (asked.checkpointing, "none", "selective", "full"):
        yield replace(setting, checkpointing=checkpointing)
    for prefetch in {max(setting.prefetch - 1, 0), setting.prefetch + 1}:
        yield replace(setting, prefetch=prefetch)
    sequences = setting.batch * setting.micro_batches
    batches = [batch for batch in range(1, sequences + 1) if sequences % batch == 0]
    at = batches.index(setting.batch)
    for batch in batches[max(at - 1, 0) : at + 2]:
        yield replace(setting, batch=batch, micro_batches=sequences // batch)


def _may_be_faster(plan: Plan, setting: Setting) -> bool:
    """Whether ``setting``, which differs from that of ``plan`` by one choice, can take less time for a step.

    It can't by computing more again, or by gathering later; nor by communicating otherwise, where nothing waits for communication.
    """
    before, lasts = plan.setting, plan.duration
    assert lasts is not None
    if setting.checkpointing != before.checkpointing:
        again: list[Any] = ["none", "selective", "full"]
        known = setting.checkpointing in again and before.checkpointing in again
        return not known or again.index(setting.checkpointing) < again.index(before.checkpointing)
    if setting.prefetch < before.prefetch:
        return False
    if setting.prefetch > before.prefetch or setting.strategy != before.strategy:
        return sum(lasts.exposed.values()) + lasts.idle > GAIN * lasts.step
    return True


def _key(setting: Setting) -> tuple[object, ...]:
    shown = setting.strategy, setting.node_size, setting.checkpointing, setting.prefetch, setting.batch
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
