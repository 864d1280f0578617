"""What a search has found, as plain values and as tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..printable import in_bytes
from ..tables import Table
from .result import Plan
from .setting import Setting


@dataclass(frozen=True)
class Proposal:
    """changes: by the choice's name, what it is instead of what was asked for

    told_apart: from the fastest proposal: their times' ranges do not overlap. None: the card has no range, or it is the fastest
    """

    plan: Plan
    changes: dict[str, str]
    told_apart: bool | None = None

    @property
    def step(self) -> float:
        """Seconds, by a model."""
        assert self.plan.duration is not None
        return self.plan.duration.step

    def compared_with(self, fastest: Proposal) -> Proposal:
        """With ``told_apart`` from ``fastest``."""
        own, other = self.plan.duration, fastest.plan.duration
        assert own is not None
        assert other is not None
        if self.plan is fastest.plan or not (own.has_range and other.has_range):
            return self
        return replace(self, told_apart=own.fastest > other.slowest or own.slowest < other.fastest)

    @property
    def peak(self) -> int:
        return self.plan.memory.peak.nbytes


@dataclass(frozen=True)
class Dropped:
    """A candidate that does not fit, or that cannot be. why: in words"""

    changes: dict[str, str]
    why: str


@dataclass(frozen=True)
class Found:
    """asked: the setting as it was asked for; proposals: that fit, the fastest first; limit: bytes; num_tried: settings

    num_slower: that fit as well, and are slower, or change more without being faster
    dropped:    those that do not fit, the smallest peak first
    """

    asked: Proposal
    proposals: tuple[Proposal, ...]
    limit: float
    num_tried: int
    num_slower: int = 0
    dropped: tuple[Dropped, ...] = ()

    @property
    def table(self) -> Table:
        rows = [("as asked", *_costs(self.asked, self.limit))]
        rows += [(words_of(each.changes), *_costs(each, self.limit)) for each in self.proposals if each.changes]
        slower = f"; {self.num_slower} more fit, and are no better" if self.num_slower else ""
        equal = sum(each.told_apart is False for each in self.proposals)
        slower += f"; {equal} cannot be told apart from the fastest: the ranges of their times overlap" if equal else ""
        return Table(
            f"{len(self.proposals)} settings within {in_bytes(self.limit)} per rank, the fastest first, of {self.num_tried} tried",
            ("change", "step", "told apart", "MFU", "peak of a rank", "fits"),
            tuple(rows),
            f"step times are {self.asked.plan.methods['duration']} (docs/step_clock.md){slower}"
            if self.proposals
            else "nothing that was tried fits: take more ranks, or offload",
        )

    @property
    def tables(self) -> list[Table]:
        """All that a search says: what fits, how to train with the fastest of it, and why others were dropped."""
        found = [self.table]
        if self.proposals:
            found.append(_in_code(self.proposals[0]))
        if self.dropped:
            rows = tuple((words_of(each.changes), each.why) for each in self.dropped)
            found.append(Table(f"{len(rows)} were dropped", ("change", "why"), rows, left=(0, 1)))
        return found


def words_of(changes: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items())


def _costs(proposal: Proposal, limit: float) -> tuple[str, ...]:
    assert proposal.plan.duration is not None
    fits = "yes" if proposal.peak <= limit else "no"
    told_apart = {None: "", True: "yes", False: "no"}[proposal.told_apart]
    return f"{proposal.step * 1e3:,.0f} ms", told_apart, f"{proposal.plan.duration.mfu:.0%}", in_bytes(proposal.peak), fits


def _in_code(proposal: Proposal) -> Table:
    setting, changes = proposal.plan.setting, proposal.changes
    title = "To train with the fastest of them, write" if changes else "What was asked for is the fastest of them"
    return Table(title, ("change", "in your code"), tuple((name, code_of(name, setting)) for name in changes), left=(0, 1))


def code_of(choice: str, setting: Setting) -> str:
    """What a training script says for ``choice`` as ``setting`` has it."""
    if choice == "strategy":
        shards = "" if setting.shard_size is None else f", shard_size={setting.shard_size}"
        return f'fsdp2.parallelize(model, "{setting.strategy}"{shards})'
    if choice == "checkpointing":
        before = f'fsdp2.apply_activation_checkpointing(model, "{setting.checkpointing}")'
        if setting.checkpointing == "selective":
            before = "fsdp2.apply_activation_checkpointing(model, ActivationCheckpointPolicy(save_ops=HEAVY_OPS))"
        return "no activation checkpointing" if setting.checkpointing == "none" else f"{before}, before parallelize"
    if choice == "prefetch":
        return f"model.set_prefetch_depth({setting.prefetch})"
    if choice == "wrap":
        return 'fsdp2.parallelize(..., wrap="auto")' if setting.wrap == "auto" else 'wrap=fsdp2.wrap.by_class("Linear", "Embedding")'
    return f"batches of {setting.batch}, {setting.micro_batches} with fsdp2.accumulate in each step"
