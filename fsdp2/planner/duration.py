"""The time that a recorded step would take on a card, by a model: docs/step_clock.md has its error and what it leaves out.

The host's time above torch's dispatcher is not counted, so steps on a slow host take longer than this says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from ..testing.clock.cards import Card
from ..testing.clock.costs import dtype_of_product, flops_of
from ..testing.clock.report import break_down
from ..testing.clock.timeline import COMPUTE, Clock, Span
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


def duration_of(entries: Sequence[Entry], groups: Sequence[Ranks], card: Card, middle: slice, times: int) -> Duration:
    """The duration on ``card`` of the step of ``entries``, whose ``middle`` comes ``times`` times more.

    The middle lasts from where compute has ended what is before it until compute has ended it.
    Raises: ArgumentError if a product has a dtype for which the card has no rate
    """
    for entry in entries:
        if entry.kind == "op" and flops_of(entry) and (dtype := dtype_of_product(entry)) not in card.flops:
            raise ArgumentError(
                f"the card {card.name} has no rate for products in {dtype}, and the step has {entry.name}",
                expected=f"products in one of {list(card.flops)}",
                fix="another card, another dtype, or a rate under flops in the card's file (fsdp2 measure writes one)",
            )
    clock = Clock(card, groups)
    ends: list[float] = []
    for some in (entries[: middle.start], entries[middle]):
        clock.run(some)
        ends.append(max((span.stop for span in clock.spans if span.stream == COMPUTE), default=0.0))
    repeated = [span for span in clock.spans if ends[0] < span.stop <= ends[1]] * times
    clock.run(entries[middle.stop :])
    parts, again = break_down(clock.spans, 0.0, clock.end), break_down(clock.spans, *ends)
    step = clock.end + times * (ends[1] - ends[0])
    exposed = {phase: seconds + times * again.exposed.get(phase, 0.0) for phase, seconds in parts.exposed.items()}
    idle = parts.idle + parts.waiting + times * (again.idle + again.waiting)
    forward = _forward_flops(clock.spans) + _forward_flops(repeated)
    peak = max(
        (card.flops.get(tensor.dtype, 0.0) for span in clock.spans if flops_of(span.entry) for tensor in span.entry.tensors),
        default=0.0,
    )
    # Backward computes each product twice: for the gradients of inputs and of weights.
    mfu = 3 * forward / (step * peak) if peak else 0.0
    fastest, slowest = (step * ratio for ratio in card.measured_over_modeled)
    return Duration(card.name, step, parts.computing + times * again.computing, exposed, idle, mfu, fastest, slowest)


def _forward_flops(spans: Sequence[Span]) -> float:
    return sum(flops_of(span.entry) for span in spans if span.phase == "forward" and span.entry.kind == "op")
