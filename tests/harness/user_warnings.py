"""What fsdp2 warns of: rank 0 shows it, at a line of the test that led to it."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def warned_on_rank_0(category: type[Warning], match: str) -> Iterator[list[warnings.WarningMessage]]:
    """The block warns rank 0 of ``match``, at a line of the file that called this, and no other rank. Yields what it showed."""
    caller = sys._getframe(2).f_code.co_filename
    shown: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", category)
        yield shown
    shown += [each for each in caught if issubclass(each.category, category)]
    expected = dist.get_rank() == 0
    assert any(re.search(match, str(each.message)) for each in shown) == expected, [str(each.message) for each in shown]
    assert {each.filename for each in shown} == ({caller} if expected else set())
