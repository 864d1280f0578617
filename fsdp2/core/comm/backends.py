"""What a communication backend can do, and which algorithm suits it, by its name and the sizes of world and buffer."""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ...policy import is_stock_alone

AllGatherAlgorithm = Literal["stock", "broadcast"]
ReduceScatterAlgorithm = Literal["stock", "all_to_all", "pairwise", "all_reduce"]
AllReduceAlgorithm = Literal["stock", "all_gather"]

# In schedule and memory tests and in plans "fake" stands for NCCL and takes its path everywhere; "fake_gloo" gloo's.
_STREAM_ORDERED = {"nccl", "xccl", "fake"}
_AVERAGES = {"nccl", "fake"}
_GLOO = {"gloo", "fake_gloo"}


def declare_backend(backend: str, *, averages: bool) -> None:
    """Treat a backend that was registered with torch as NCCL: ordered by the caller's stream, with coalescing.

    averages: it knows AVG, as NCCL computes it
    """
    _STREAM_ORDERED.add(backend)
    if averages:
        _AVERAGES.add(backend)


_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def backend_of(process_group: dist.ProcessGroup | None, device_type: str) -> str:
    """The backend that carries collectives of tensors on ``device_type``; "" for no group.

    ``dist.get_backend`` instead returns what the user wrote: "cpu:gloo,cuda:nccl", or "undefined" for nothing at all.
    """
    if process_group is None:
        return ""
    by_device = _backends.get(process_group)
    if by_device is None:
        pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
        by_device = _backends[process_group] = {device: backend for device, _, backend in pairs}
    return by_device.get(device_type) or str(dist.get_backend(process_group))


def is_stream_ordered(backend: str) -> bool:
    """Whether the caller's stream orders collectives (pass ``async_op=False``); else the caller waits for a Work.

    For a backend that fsdp2 does not know, the caller waits, which is right everywhere.
    """
    return backend in _STREAM_ORDERED


def averages(backend: str) -> bool:
    """Whether the backend knows AVG."""
    return backend in _AVERAGES


def is_gloo(backend: str) -> bool:
    """Whether the backend has gloo's algorithms."""
    return backend in _GLOO


def moves_data(backend: str) -> bool:
    """Whether the backend moves data between ranks; a fake one does not."""
    return backend not in ("fake", "fake_gloo")


def choose_all_gather(backend: str, world_size: int, nbytes: int, device_type: str = "cpu") -> AllGatherAlgorithm:
    """The default all-gather. nbytes: of the gathered buffer"""
    # gloo's own packs into temporaries of the output's size: at 50 MiB it takes three times as long. Small broadcasts
    # cost one launch per rank.
    if is_stock_alone(device_type):
        return "stock"
    if is_gloo(backend) and (nbytes >= world_size * (128 << 10) or device_type != "cpu"):
        return "broadcast"
    return "stock"


def choose_reduce_scatter(
    backend: str, world_size: int, nbytes: int, device_type: str = "cpu"
) -> ReduceScatterAlgorithm:
    """The default reduce-scatter. nbytes: of the input"""
    if not is_gloo(backend) or is_stock_alone(device_type):
        return "stock"
    if device_type != "cpu":  # gloo's all-to-all takes host memory only
        return "all_reduce"
    # Pairwise sends least, with least scratch, but each of W - 1 rounds greets all ranks: for few ranks, large rows.
    if world_size == 2 or (world_size <= 8 and nbytes >= world_size * (1 << 20)):
        return "pairwise"
    return "all_to_all"


def choose_all_reduce(backend: str, world_size: int, nbytes: int, device_type: str = "cpu") -> AllReduceAlgorithm:
    """The default all-reduce. nbytes: of the buffer"""
    if is_stock_alone(device_type):
        return "stock"
    if is_gloo(backend) and device_type == "cpu" and nbytes * world_size <= 256 << 10:  # only latency matters
        return "all_gather"
    return "stock"
