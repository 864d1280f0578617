"""How many optimizer steps have begun in this process: what was unsharded before one is out of date after it.

Version counters do not tell, for fused and foreach optimizers leave those of DTensors alone. ``modules/optimizer_steps.py`` counts; the
memory of a group compares. This file refuses to know optimizers.
"""

from __future__ import annotations


class StepCount:
    """Steps of any optimizer that began so far."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


OPTIMIZER_STEPS = StepCount()
