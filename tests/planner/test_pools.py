"""Bytes by the stream that they are allocated on: an allocator keeps a pool for each, and what is free in one serves no other."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import torch
from torch import nn

import fsdp2
from fsdp2.core.iteration.unit_tree import UnitTree
from fsdp2.planner import api
from fsdp2.planner.streams import COMPUTE, COPY_IN

DIM, VOCABULARY, BLOCKS = 64, 512, 3
BLOCK_NBYTES = 2 * (2 * 4 * DIM * DIM)  # in bf16


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 4 * DIM, bias=False), nn.ReLU(), nn.Linear(4 * DIM, DIM, bias=False))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def peaks_of_a_step() -> tuple[Counter[int], int]:
    """The most bytes of each stream's blocks in a step on the device, and of all together."""
    rehearsed = []

    def kept(before, blocks, entries, unit_of_node):
        rehearsed.append((before, blocks, entries))
        return visits_of(before, blocks, entries, unit_of_node)

    visits_of = api.visits_of
    with torch.device("meta"):
        model = Model()
    with mock.patch.object(api, "visits_of", kept):
        fsdp2.plan(model, 8, wrap=[Block], param_dtype=torch.bfloat16, reduce_dtype=torch.float32, backend="nccl", sequence=64)
    before, blocks, entries = rehearsed[0]
    nbytes = {block.id: block.nbytes for block in (*before, *blocks)}
    stream_of = {block.id: COMPUTE for block in before}
    now = Counter({COMPUTE: sum(block.nbytes for block in before)})
    peaks, most = now.copy(), now.total()
    for entry in entries:
        if entry.kind == "alloc":
            stream_of[entry.id] = entry.stream
        if entry.kind in ("alloc", "free") and entry.id in stream_of:
            now[stream_of[entry.id]] += nbytes[entry.id] if entry.kind == "alloc" else -nbytes[entry.id]
            peaks |= now
            most = max(most, now.total())
    return peaks, most


def test_the_gather_alongside_the_loss_takes_one_unit_from_a_pool_of_its_own_and_adds_nothing_to_the_peak():
    """See Note: alongside the loss. What is reserved is at least the sum of the pools' peaks, which a plan's peak leaves out."""
    peaks, most = peaks_of_a_step()
    with mock.patch.object(UnitTree, "issue_for_backward", lambda tree, unit: unit.issue()):
        on_compute, most_on_compute = peaks_of_a_step()
    assert on_compute[COPY_IN] == 0
    assert peaks[COPY_IN] == BLOCK_NBYTES
    assert most <= most_on_compute
    assert peaks.total() <= on_compute.total() + BLOCK_NBYTES
