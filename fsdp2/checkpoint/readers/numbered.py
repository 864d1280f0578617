"""The missing numbers of ranks or parts, where numbers come from names that a stranger may have chosen.

Worked example: a folder with ``model-00001-of-99999999999.bin`` alone misses more numbers than fit in memory; a hundred are enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence


def missing_numbers(numbers: Collection[int], start: int, stop: int) -> list[int]:
    """Numbers from ``start`` to ``stop`` that are not in ``numbers``: at most a few more than these, however large a file's number."""
    return list(itertools.islice((number for number in range(start, stop) if number not in numbers), len(numbers) + 100))


def shown(numbers: Sequence[int]) -> str:
    """The first of them."""
    return f"{list(numbers[:20])}" + (" and more" if len(numbers) > 20 else "")
