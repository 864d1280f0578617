"""How many optimizer steps have begun in this process, for records of a run. ``modules/optimizer_steps.py`` counts.

Nothing that ranks decide may depend on it: one rank may step an optimizer of its own.
"""

from __future__ import annotations


class StepCount:
    """How many steps of any optimizer have begun so far."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


OPTIMIZER_STEPS = StepCount()
