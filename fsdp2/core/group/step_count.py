"""How many optimizer steps have begun in this process: parameters that were unsharded before a step are out of date after it.

Version counters do not tell, because fused and foreach optimizers do not move those of DTensors. ``modules/optimizer_steps.py``
counts; the memory of a group compares. This file refuses to know optimizers.
"""

from __future__ import annotations


class StepCount:
    """How many steps of any optimizer have begun so far."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


OPTIMIZER_STEPS = StepCount()
