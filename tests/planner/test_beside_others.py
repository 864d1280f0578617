"""A plan leaves the rest of its process alone: other threads' collectives, torch's log, what ``init_process_group`` sets."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2.errors import ModuleError
from fsdp2.torch_names import torch_tensors
from harness import on_ranks


@on_ranks(2)
def test_a_thread_that_communicates_while_another_one_plans_sees_its_own_ranks(world_size):
    """The plan swapped torch's record of process groups for all threads: a thread that saved was alone in a world of 64 ranks."""
    seen: list[Any] = []
    outside = dist.get_rank(), dist.distributed_c10d._world, sys.excepthook, torch_tensors.current_device("cpu")

    def save() -> None:
        found = torch.full((1,), float(dist.get_rank() + 1))
        dist.all_reduce(found)
        pair = dist.new_group(list(range(world_size)))
        dist.barrier(group=pair)
        seen.append((dist.get_world_size(), dist.get_rank(), found.item(), dist.get_world_size(pair)))

    def inputs(batch: int, sequence: int) -> tuple[Tensor]:
        seen.append(dist.get_world_size())
        saving = threading.Thread(target=save)
        saving.start()
        saving.join()
        return (torch.ones(batch, 4),)

    fsdp2.plan(nn.Linear(4, 4), 64, inputs=inputs)
    assert seen == [64, (2, outside[0], 3.0, 2)]
    assert (dist.get_rank(), dist.distributed_c10d._world, sys.excepthook, torch_tensors.current_device("cpu")) == outside


def test_a_wrong_input_is_one_error_without_a_traceback_of_tensors_without_memory_before_it():
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(ModuleError, match="when it was called with"):
            fsdp2.plan(nn.Conv2d(3, 8, 3), 4)
        assert not records
        log.error("somebody else's")
        assert len(records) == 1, "the log is as it was"
    finally:
        log.removeHandler(handler)


class Attending(nn.Module):
    """Takes the causal path where positions show one sequence only, and builds a mask otherwise, as transformers does."""

    def __init__(self, positions_of: Any) -> None:
        super().__init__()
        self.table, self.positions_of = nn.Embedding(16, 8), positions_of
        self.is_causal: bool | None = None

    def forward(self, words: Tensor) -> Tensor:
        positions = self.positions_of(words)
        self.is_causal = not bool((positions.diff(dim=-1) != 1).any())
        assert positions[0, -1].item() in (words.shape[1] - 1, 2 * words.shape[1] - 2)
        x = self.table(words) * positions[..., None].clamp(max=1)
        return x if self.is_causal else x.cumsum(1)


def counted(words: Tensor) -> Tensor:
    return torch.arange(words.shape[1]).expand(words.shape)


def counted_in_place(words: Tensor) -> Tensor:
    positions = torch.zeros_like(words)
    positions[:] = torch.arange(words.shape[1])
    return positions


def drawn(words: Tensor) -> Tensor:
    return torch.randint(0, 9, tuple(words.shape))


def test_integers_that_follow_from_sizes_decide_the_path_and_others_are_refused():
    """As on real tensors; a plan of a model of transformers with grouped queries took the path of a graph that is traced."""
    ways: list[bool | None] = []

    class Noting(Attending):
        def forward(self, words: Tensor) -> Tensor:
            out = super().forward(words)
            ways.append(self.is_causal)
            return out

    planned = fsdp2.plan(Noting(counted), 2, sequence=8)
    assert ways
    assert all(ways)
    assert planned.memory.peak.nbytes < fsdp2.plan(Noting(lambda words: counted(words) * 2 % 15), 2, sequence=8).memory.peak.nbytes
    assert ways[-1] is False
    for unknown in (drawn, counted_in_place):
        with pytest.raises(ModuleError, match="reads values of tensors"):
            fsdp2.plan(Noting(unknown), 2, sequence=8)
