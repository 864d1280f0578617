"""Tags behind gradients: which sums of them say that ranks reduced different groups, in any dtype, by any divisor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp2.core.group.reduce_plan import NUM_DIGITS, TAG_NUMEL, tag_of
from fsdp2.core.iteration.late_comparison import are_mixed, number_instead

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reduced(numbers: list[int], dtype: torch.dtype, before: float = 1.0, behind: float = 1.0) -> Tensor:
    """What ranks that reduce these groups get, one rank's tag added after another."""
    total = torch.zeros(TAG_NUMEL, dtype=dtype)
    for number in numbers:
        total += torch.tensor(tag_of(number), dtype=dtype) * before
    return (total * behind).float().view(1, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3, 1000])
@pytest.mark.parametrize("divides", ["before", "behind", "nowhere"])
def test_one_rank_of_many_that_reduces_another_group_is_seen_and_named(dtype, world_size, divides):
    scale = {} if divides == "nowhere" else {divides: 1 / world_size}
    assert are_mixed(reduced([5] * world_size, dtype, **scale)) == [False]
    for other in (4, 7, 1023, 0):
        tags = reduced([5] * (world_size - 1) + [other], dtype, **scale)
        assert are_mixed(tags) == [True]
        assert number_instead(5, tags[0]) == other


def test_any_two_numbers_are_told_apart():
    tags = torch.tensor([tag_of(number) for number in range(1 << NUM_DIGITS)])
    assert torch.equal(tags.sum(1), torch.full((len(tags),), NUM_DIGITS))
    for number in range(0, len(tags), 37):
        mixed = are_mixed(tags + tags[number])
        assert [index for index, each in enumerate(mixed) if not each] == [number]


def test_of_two_other_groups_none_is_named():
    assert number_instead(5, reduced([5, 6, 6, 9, 5], torch.float32)[0]) is None


def test_what_has_become_zero_or_nan_says_nothing():
    assert are_mixed(torch.stack([torch.zeros(TAG_NUMEL), torch.full((TAG_NUMEL,), torch.nan)])) == [False, False]


def test_later_numbers_begin_again():
    assert tag_of(1024 + 5) == tag_of(5)
    assert number_instead(1024 + 5, reduced([5, 4], torch.float32)[0]) == 4
