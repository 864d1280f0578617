"""Process groups of our own do not depend on those that ranks have made before, and do not disturb those that they make later."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint.checkpointer import borrow_group, give_back
from fsdp2.core.comm.agreement import another_over
from harness import on_ranks


def all_reduced(group: dist.ProcessGroup) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def world_wide_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=20))


@on_ranks(3)
def test_a_group_of_some_ranks_does_not_disturb_later_groups_of_all():
    """Symptom: the next ``new_group`` hung. Cause: from torch 2.14 on, a group of some ranks shifts the names of their later groups."""
    some = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert all_reduced(another_over(some, "test")) == 2
    assert all_reduced(world_wide_group()) == 3
    if dist.get_rank() < 2:
        own = borrow_group(some)
        assert all_reduced(own) == 2
        give_back(own, some)
    assert all_reduced(world_wide_group()) == 3


@on_ranks(3)
@pytest.mark.parametrize("make", ["another", "borrowed"])
def test_a_group_of_some_ranks_does_not_disturb_later_groups_that_some_ranks_make_alone(make):
    """Symptom: ranks 1 and 2 waited. Cause: before torch 2.14 the name of such a group holds the number of groups of a rank."""
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}  # two for each rank
    some = pairs[0, 1]
    if dist.get_rank() < 2:
        own = another_over(some, "test") if make == "another" else borrow_group(some)
        assert all_reduced(own) == 2
    if dist.get_rank() > 0:
        assert all_reduced(dist.new_group([1, 2], use_local_synchronization=True, timeout=timedelta(seconds=20))) == 2
    if dist.get_rank() < 2:
        dist.destroy_process_group(own)


@on_ranks(2)
@pytest.mark.parametrize("make", ["another", "borrowed"])
def test_ranks_that_have_made_different_numbers_of_groups_make_one_of_ours(make):
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    made = another_over(dist.group.WORLD, "test") if make == "another" else borrow_group(None)
    assert all_reduced(made) == 2


@on_ranks(2)
def test_two_groups_of_ours_over_the_same_ranks_are_two():
    groups = [another_over(dist.group.WORLD, "test") for _ in range(2)]
    tensors = [torch.ones(1), torch.ones(1)]
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    pending = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for each in pending:
        each.wait()
    assert [tensor.item() for tensor in tensors] == [2, 2]
