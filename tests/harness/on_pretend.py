"""Which tests for the CPU run on the pretend accelerator as well, and must then compute the same bits.

A test of a file in ``FILES`` that runs on one or two ranks gets one more variant, ``ranks2-pretend``. It is quick if ``QUICK`` names
it, and left out if ``LEFT_OUT`` does, which says why. Among more ranks gloo adds in another order than the accelerator's process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

FILES: dict[str, set[str]] = {
    "extensions/test_training.py": set(),
    "numerics/test_accumulation.py": set(),
    "numerics/test_mixed_precision.py": {"test_bf16_parameters_reduced_in_fp32", "test_gradients_accumulate_in_the_reduce_dtype"},
    "numerics/test_resharding.py": {
        "test_every_reshard_after_forward_gives_the_same_numbers",
        "test_unsharding_by_hand_changes_nothing",
    },
    "numerics/test_shapes.py": set(),
}
"""The tests of each file; none named: all."""
QUICK = {"test_gradients_reduced_at_every_micro_batch_add_up", "test_negative_dims_of_shard_placement_fn_count_from_the_end"}
LEFT_OUT = {
    "test_channels_last_parameters_keep_their_memory_format": "the accelerator has no convolutions",
    "test_parameters_of_several_dtypes_in_one_call": "there, optimizers round an update in half precision elsewhere",
}


class OnPretend(int):
    """A number of ranks, on the pretend accelerator."""


def on_pretend(path: str, name: str, world_sizes: Sequence[int]) -> list[Any]:
    """The variants, none or one, of the test ``name`` in the file ``path``."""
    try:
        file = Path(path).resolve().relative_to(TESTS).as_posix()
    except ValueError:  # a test that pytester has written
        return []
    world_size = 2 if 2 in world_sizes else min(world_sizes)
    names = FILES.get(file)
    if names is None or (names and name not in names) or name in LEFT_OUT or world_size > 2:
        return []
    marks = [] if name in QUICK else [pytest.mark.slow]
    return [pytest.param(OnPretend(world_size), id=f"ranks{world_size}-pretend", marks=marks)]


__all__ = ["OnPretend", "on_pretend"]
