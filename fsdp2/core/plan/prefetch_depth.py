"""How many units are gathered ahead of the one that runs. This file takes counts and bytes.

Worked example: depth of three units and at most 1000 bytes; the next units have 400, 500 and 300 bytes unsharded: two are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefetchDepth:
    """units: at most so many, 0 for none. max_nbytes: bound of their unsharded parameters together, but the next unit always fits."""

    units: int = 1
    max_nbytes: int | None = None

    def reach(self, nbytes: Iterable[int]) -> int:
        """How many of the next units are gathered ahead. nbytes: of their unsharded parameters, in their order"""
        count = total = 0
        for each in nbytes:
            total += each
            if count == self.units or (count > 0 and self.max_nbytes is not None and total > self.max_nbytes):
                break
            count += 1
        return count


NEXT_ONE = PrefetchDepth()
