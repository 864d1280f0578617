"""The most memory that a rank's process really takes, as the kernel counts it: what other tests count in tensors, with all the rest.

A model of 336 MB: whoever holds it whole, or the one parameter of 240 MB, is far above each bound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint import full_state_dict, load_safetensors, save_safetensors
from harness import on_ranks
from harness.sharding import shard_blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status and clear_refs, which Linux has"),
]

REST = 40_000_000
"""Bytes for what is no tensor of ours: allocators, sockets, modules that are imported late."""

SMALL, LARGE = 24_000_000, 240_000_000


def sharded_on_meta() -> nn.Module:
    """4 layers of 24 MB and one of 240 MB."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2000, 3000 if index < 4 else 30_000, bias=False) for index in range(5)])
    return shard_blocks(model)


def sharded() -> nn.Module:
    model = sharded_on_meta().to_empty(device="cpu")
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.fill_(float(index))
    return model


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) * 1024


def peak_growth(action: Callable[[], object], times: int = 1) -> int:
    """Bytes of the highest resident set during ``action``, over what was resident before it ran first; the least of so many times.

    A thread of gloo that loses its core holds a buffer beside the next one: what the least of a few runs needs is what ours holds.
    """
    before = _status("VmRSS")
    peaks = []
    for _ in range(times):
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
        action()
        peaks.append(_status("VmHWM"))
    return min(peaks) - before


@on_ranks(2)
@pytest.mark.parametrize("num_writers", [1, None], ids=["rank 0 writes", "all ranks write"])
def test_saving_takes_two_buffers(num_writers: int | None, tmp_path: Path) -> None:
    model = sharded()
    growth = peak_growth(lambda: save_safetensors(model, tmp_path, "100MB", num_writers=num_writers), times=3)
    assert growth <= 2 * (64 << 20) + REST


@on_ranks(2)
@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "values"])
def test_loading_takes_the_shards_a_group_and_two_buffers(on_meta: bool, tmp_path: Path, world_size: int) -> None:
    """From meta, the shards and one group's once more; over values, a copy of the shards."""
    save_safetensors(sharded(), tmp_path)
    model = sharded_on_meta() if on_meta else sharded()
    growth = peak_growth(lambda: load_safetensors(model, tmp_path))
    shards = (4 * SMALL + LARGE) // world_size
    group = LARGE // world_size if on_meta else 0
    assert growth <= shards + group + 2 * (16 << 20) + REST
    assert all(param.to_local().flatten()[0] == index for index, param in enumerate(model.parameters()))


@on_ranks(2)
def test_loading_in_place_takes_two_buffers(tmp_path: Path) -> None:
    model = sharded()
    save_safetensors(model, tmp_path)
    assert peak_growth(lambda: load_safetensors(model, tmp_path, in_place=True)) <= 2 * (16 << 20) + REST


@on_ranks(2)
def test_the_full_state_takes_the_result_and_two_bands() -> None:
    """Rank 0 ends with all of it."""
    model = sharded()
    result = {}

    def take() -> None:
        result.clear()
        result.update(full_state_dict(model))

    growth = peak_growth(take, times=3)
    whole = 4 * SMALL + LARGE if dist.get_rank() == 0 else 0
    assert growth <= whole + 2 * (64 << 20) + REST
    assert len(result) == (5 if dist.get_rank() == 0 else 0)
