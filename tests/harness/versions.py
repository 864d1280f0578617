"""What a test needs of torch, where it compares with upstream or uses what only later versions have.

    @needs_torch("2.13", "DataParallelMeshDims")
    def test_placements_are_those_of_torch(): ...

    @pytest.mark.parametrize("kind", ["ours", pytest.param("torch", marks=needs_torch("2.13", "ShardPlacementResult"))])

The test imports what it needs in its body, so that the rest of its file runs with every version. What fsdp2 itself promises needs no
such mark: it holds from torch 2.11 on.
"""

from __future__ import annotations

import pytest
import torch


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """A mark that skips the test, or the one parameter that carries it, with torch before ``version``, which brought ``what``."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"torch {torch.__version__} has no {what}: that came with {version}")
