"""The values that files of a run's folder must hold, so that commands tell which file is broken, and where.

A shape is a ``Kind``; ``{"key": shape}`` for objects with these keys, and perhaps others; ``Each(shape)`` for objects of any keys;
``[shape]`` for lists; a tuple of shapes where one of them must fit; or a function from the value to its shape.

    misfit({"step": "one"}, {"step": NATURAL}) == "step: expected a whole number, 0 or more"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..arguments import NATURAL, WORD, Kind
from .fingerprint import NUM_SKETCHES


@dataclass(frozen=True)
class Each:
    shape: Any


def misfit(value: Any, shape: Any) -> str:
    """Where ``value`` first differs from ``shape``, and what is expected there; "" if it fits."""
    if isinstance(shape, Kind):
        return "" if shape.holds(value) else f": expected {shape.expected}"
    if isinstance(shape, tuple):
        found = [misfit(value, each) for each in shape]
        return "" if "" in found else found[-1]
    if callable(shape):
        return misfit(value, shape(value))
    if isinstance(value, list if isinstance(shape, list) else dict):
        below = ((place, misfit(each, inner)) for place, each, inner in _parts(value, shape))
        return next((f".{place}{said}".removeprefix(".") for place, said in below if said), "")
    return f": expected {'a list' if isinstance(shape, list) else 'an object'}"


def _parts(value: Any, shape: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(shape, list):
        yield from ((place, each, shape[0]) for place, each in enumerate(value))
    elif isinstance(shape, Each):
        yield from ((place, each, shape.shape) for place, each in value.items())
    else:
        yield from ((place, value.get(place), inner) for place, inner in shape.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64)


NUMBER = Kind(_is_number, "a number", "1.0")
SIZE = Kind(lambda value: _is_number(value) and not value < 0, "a number, 0 or more", "1.0")
WHOLE = Kind(lambda value: NATURAL.holds(value) and value < 2**64, "a whole number, 0 or more", "0")
NOTHING = Kind(lambda value: value is None, "nothing", "None")

LEDGER_LINE = {
    "step": WHOLE,
    "duration_ms": SIZE,
    "tokens": (NOTHING, SIZE),
    "memory": Each(SIZE),
    "allocator_peak": (NOTHING, SIZE),
    "communication": Each(Each({"calls": SIZE, "nbytes": SIZE, "sent": SIZE, "exposed_ms": SIZE})),
    "computing_ms": (NOTHING, Each(Each(SIZE))),
    "exposed_ms": SIZE,
    "hooks_ms": SIZE,
}
"""What ``ledger`` writes for a step."""

_FINDING = {"severity": WORD, "check": WORD, "what": WORD, "why": WORD, "fix": WORD, "params": [WORD]}
_PLAN = {
    "peak": {"nbytes": SIZE},
    "most": Each(SIZE),
    "moments": [{"phase": WORD, "where": WORD, "nbytes": SIZE}],
    "traffic": [{"phase": WORD, "kind": WORD, "sent": SIZE}],
}
RUN = {"model": WORD, "ranks": WHOLE, "device": WORD, "torch": WORD, "fsdp2": WORD, "plan": (NOTHING, _PLAN), "findings": [_FINDING]}
RUN["resumed"] = (NOTHING, {"step": WHOLE, "source": WORD, "lost": WORD})
"""What ``ledger`` writes of the run."""

_EVENTS: dict[object, Any] = {
    "X": {"tid": WHOLE, "cat": WORD, "name": WORD, "ts": NUMBER, "dur": SIZE, "args": {"unit": WORD}},
    "b": {"id": WORD, "cat": WORD, "name": WORD, "ts": NUMBER},
    "e": {"id": WORD, "ts": NUMBER},
    "C": {"ts": NUMBER, "args": Each(SIZE)},
}


def _event(event: Any) -> dict[str, Any]:
    kind = event.get("ph") if isinstance(event, dict) else None
    return {"ph": WORD, **_EVENTS.get(str(kind), {})}


TRACE = {"traceEvents": [_event]}
"""What ``trace`` writes."""


def _is_sketch(value: Any) -> bool:
    return isinstance(value, list) and len(value) == NUM_SKETCHES and all(map(_is_number, value))


_SAID = {"checksum": WHOLE, "squares": SIZE, "sketch": Kind(_is_sketch, f"{NUM_SKETCHES} numbers", "[]"), "replica": WHOLE, "eps": SIZE}
RECORD_LINE = {"step": WHOLE, **dict.fromkeys(("parameters", "gradients", "update"), Each(Each(_SAID)))}
"""What ``record`` writes for a step."""
