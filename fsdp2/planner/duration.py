"""The time that a recorded step would take on a card, by a model: docs/step_clock.md has its error and what it leaves out.

The host's time above torch's dispatcher is not counted, so steps on a slow host take longer than this says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..testing.clock.cards import Card
from ..testing.clock.costs import flops_of
from ..testing.clock.report import break_down
from ..testing.clock.timeline import Clock
from ..testing.clock.trace import Entry, Ranks


@dataclass(frozen=True)
class Duration:
    """The times of one step, in seconds. exposed: by phase, compute does nothing and a collective runs; idle: nothing runs

    fastest, slowest: eight of ten lie between, by the model's error on published steps of GPUs of this generation
    mfu: floating point operations of the model, without those that are computed again, over what the card could do in that time
    """

    card: str
    step: float
    computing: float
    exposed: dict[str, float]
    idle: float
    mfu: float
    fastest: float
    slowest: float

    @property
    def has_range(self) -> bool:
        """Whether published steps were compared with the model on GPUs of this generation."""
        return self.fastest < self.slowest


def duration_of(entries: Sequence[Entry], groups: Sequence[Ranks], card: Card) -> Duration:
    """The duration on ``card`` of the step of ``entries``."""
    clock = Clock(card, groups)
    clock.run(entries)
    parts = break_down(clock.spans, 0.0, clock.end)
    forward = sum(flops_of(span.entry) for span in clock.spans if span.phase == "forward" and span.entry.kind == "op")
    peak = max(
        (card.flops.get(tensor.dtype, 0.0) for span in clock.spans if flops_of(span.entry) for tensor in span.entry.tensors),
        default=0.0,
    )
    # Backward computes each product twice: for the gradients of inputs and of weights.
    mfu = 3 * forward / (clock.end * peak) if peak else 0.0
    fastest, slowest = (clock.end * ratio for ratio in card.measured_over_modeled)
    return Duration(card.name, clock.end, parts.computing, parts.exposed, parts.idle + parts.waiting, mfu, fastest, slowest)
