"""Bytes that a plan says a rank sends are those of the collectives that real gloo ranks issue, and those that their ledger counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import parallelize
from fsdp2.inspector.report.reading import read_run
from fsdp2.inspector.report.tables import communication
from harness import on_ranks
from harness.inspected import folder_for_all

WIDTH = 512


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def inputs(batch: int, sequence: int) -> tuple[torch.Tensor]:
    return (torch.ones(batch, WIDTH),)


class Sent:
    """Bytes that this rank sends, by function: as the source of a broadcast to each other rank, around a ring for the rest."""

    def __init__(self) -> None:
        self.nbytes = Counter[str]()

    def __enter__(self) -> Sent:
        names = ("all_gather_single", "all_gather_into_tensor", "all_reduce", "broadcast", "all_to_all_single")
        self._patches = [mock.patch.object(dist, name, self._counted(name)) for name in names if hasattr(dist, name)]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _counted(self, name: str) -> Any:
        real = getattr(dist, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            size = dist.get_world_size(group)
            if name == "broadcast":
                sent = args[0].nbytes * (size - 1) if kwargs["group_src"] == dist.get_rank(group) else 0
            elif name == "all_reduce":
                sent = args[0].nbytes * (size - 1) // size * 2
            elif name == "all_to_all_single":
                splits = args[3] if len(args) > 3 else [len(args[1]) // size] * size
                sent = args[1].nbytes - splits[dist.get_rank(group)] * args[1].itemsize
            else:
                sent = args[1].nbytes * (size - 1)
            self.nbytes[name] += sent
            return real(*args, **kwargs)

        return collective


@on_ranks(2, 4)
def test_what_a_rank_sends_on_gloo_is_what_real_ranks_send_and_what_a_ledger_counts(world_size):
    for strategy in ("zero3", "zero2", "ddp", "hsdp"):
        shard_size = world_size // 2 if strategy == "hsdp" else None
        model = parallelize(net(), strategy, shard_size=shard_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        planned = fsdp2.plan(
            net(), world_size, strategy, shard_size=shard_size, backend="gloo", optimizer="sgd", inputs=inputs, batch=4
        )

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(*inputs(4, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with Sent() as sent:
            step()
        all_sent = torch.tensor(float(sent.nbytes.total()))
        dist.all_reduce(all_sent)
        expected = sum(each.sent for each in planned.traffic)
        assert expected == pytest.approx(all_sent.item() / world_size, rel=0.001), (strategy, sent.nbytes, planned.traffic)
        folder = Path(folder_for_all())
        with fsdp2.ledger(folder, model, optimizer, plan=planned):
            step()
        dist.barrier()
        rows = communication(read_run(folder))
        kinds = {"all-gather", "reduce-scatter", "all-reduce"}
        assert {kind for _, kind, *_ in rows} & kinds
        for phase, kind, _, _, counted, _, said in rows:
            if kind in kinds:
                assert counted == said, (strategy, phase, kind)
        dist.barrier()
