"""The device that is checked: CUDA, or the pretend accelerator, on which the checks themselves are tested.

device = Device("cuda")
device.join(rank, setup, ...)     # this process takes its device and joins the process group
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.core.comm.streams import DeviceStreams
from gpu import modeled
from gpu.check import PLAYED, Setup, Skip

PRETEND = "pretend"


def count(name: str) -> int:
    """How many there are. The pretend accelerator has as many as GPU_CHECK_DEVICES says."""
    if name == PRETEND:
        return int(os.environ.get("GPU_CHECK_DEVICES", "1"))
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe(name: str) -> dict[str, Any]:
    """What the report says of this computer: devices and versions, and nothing that names it."""
    found: dict[str, Any] = {"device": name, "devices": count(name), "torch": torch.__version__, "python": sys.version.split()[0]}
    if name == "cuda":
        properties = torch.cuda.get_device_properties(0)
        nccl: Any = torch.cuda.nccl
        found |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl.version())) if dist.is_nccl_available() else None,
        }
    return found


class Device:
    """One rank's device. ``type`` is "cuda" or "pretend"."""

    def __init__(self, name: str) -> None:
        if name == PRETEND:
            from fsdp2.testing import pretend

            pretend.activate()  # from here on torch knows the name
        self.type = name
        self.device = torch.device(name, 0)
        self.is_cuda = name == "cuda"

    def join(self, rank: int, ranks: int, setup: Setup, store_path: str) -> None:
        """Collective: yes, over the ranks of this setup."""
        backend: str | None
        if self.is_cuda:
            torch.cuda.set_device(rank)
            self.device = torch.device("cuda", rank)
            backend = {"nccl": "nccl", "mixed": "cpu:gloo,cuda:nccl", "none": None, "fake": "fake", "model": modeled.BACKEND}[
                setup.backend
            ]
        else:
            from fsdp2.testing import pretend

            device_backend = f"{pretend.DEVICE_TYPE}:{pretend.BACKEND}"
            backend = {
                "nccl": pretend.BACKEND,
                "mixed": f"cpu:gloo,{device_backend}",
                "none": None,
                "fake": pretend.MODEL,
                "model": modeled.BACKEND,
            }[setup.backend]
            if backend is None:
                raise Skip("CUDA: init_process_group() without a backend finds none for the pretend accelerator")
        if setup.backend == "model":
            modeled.register(self.type)
        if setup.backend in PLAYED:
            store: Any = dist.HashStore()
            if self.is_cuda and setup.backend == "fake":
                from torch.testing._internal.distributed.fake_pg import FakeStore

                store = FakeStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=setup.ranks)
            return
        more = {"device_id": self.device} if setup.device_id and self.is_cuda else {}
        store = dist.FileStore(store_path, ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5), **more)

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.type)

    def mesh(self, *shape: int) -> DeviceMesh:
        shape = shape or (dist.get_world_size(),)
        return init_device_mesh(self.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=self.device)

    def needs_cuda(self, what: str) -> None:
        if not self.is_cuda:
            raise Skip(f"CUDA: {what}")

    def synchronize(self) -> None:
        self.module.synchronize()

    def start_late(self, seconds: float = 0.02) -> None:
        """What the current stream is given from now on runs late. (The pretend accelerator does nothing else.)"""
        if self.is_cuda:
            sleep: Any = torch.cuda._sleep  # private: torch has no public way to keep a stream busy for some time
            sleep(int(seconds * 1e9))  # in cycles, of about a nanosecond

    @contextlib.contextmanager
    def no_host_waits(self) -> Iterator[None]:
        """Inside, an operator that makes the host wait for the device raises."""
        if not self.is_cuda:
            from fsdp2.testing import pretend

            with pretend.no_host_waits():
                yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def peak_nbytes(self) -> int:
        """Since ``reset_peak``."""
        self.synchronize()
        return int(self.module.max_memory_allocated())

    def reset_peak(self) -> int:
        """Returns what is allocated now."""
        self.synchronize()
        self.module.reset_peak_memory_stats()
        return int(self.module.memory_allocated())

    def num_alloc_retries(self) -> int:
        return int(torch.cuda.memory_stats()["num_alloc_retries"]) if self.is_cuda else 0


class Serial(DeviceStreams):
    """Each order between streams waits for the whole device: nothing overlaps, so nothing can come too early."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.device)
        self._of = device

    def order(self, stream: Any, event: Any) -> None:
        self._of.synchronize()
        super().order(stream, event)


class Hostile(DeviceStreams):
    """One stream runs late, and memory that is allocated, or that the allocator has got back, is filled with NaN.

    What a program has not ordered then goes wrong: whoever reads without waiting reads old values, and whoever reads what was freed
    on the owner's stream reads NaN. The pretend accelerator does both by itself.
    """

    def __init__(self, device: Device, late: str) -> None:
        super().__init__(device.device)
        self._of = device
        self._late = late

    def order(self, stream: Any, event: Any) -> None:
        super().order(stream, event)
        if self._of.is_cuda:
            self._disturb(stream)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().resize(storage, nbytes)
        if self._of.is_cuda and nbytes > 0:
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage).fill_(0xFF)  # NaN in every floating dtype

    def _disturb(self, stream: Any) -> None:
        late = self.compute if self._late == "compute" else getattr(self, self._late)
        with self.on(late):
            self._of.start_late(0.001)
        with self.on(stream):
            self._poison(stream)

    def _poison(self, stream: Any) -> None:
        """Take the free blocks that the allocator keeps for ``stream``, fill them in the order of that stream, and let go of them."""
        handle = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        ).cuda_stream
        free = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] == handle and segment["device"] == self._device.index
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] <= 1 << 20
        ]
        taken = [torch.empty(nbytes // 4, device=self._device) for nbytes in sorted(free, reverse=True)[:32]]
        if taken:
            torch._foreach_mul_(taken, float("nan"))


@contextlib.contextmanager
def new_memory(device: Device, is_nan: bool = False) -> Iterator[None]:
    """Inside, ``torch.empty`` is full of NaN if ``is_nan``. (The pretend accelerator's always is.)

    Torch fills new memory under deterministic algorithms alone, whose bits may be others: a run to compare with takes these as well.
    """
    if not device.is_cuda:
        yield
        return
    filled: Any = torch.utils.deterministic
    before, filled.fill_uninitialized_memory = filled.fill_uninitialized_memory, is_nan
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        filled.fill_uninitialized_memory = before


@contextlib.contextmanager
def late_waits(device: Device) -> Iterator[None]:
    """Inside, a stream that waits for an event runs late afterwards: for programs that do not use our streams."""
    if not device.is_cuda:
        yield
        return
    wait = torch.cuda.Stream.wait_event

    def wait_and_be_late(stream: torch.cuda.Stream, event: Any) -> None:
        wait(stream, event)
        with torch.cuda.stream(stream):
            device.start_late(0.001)

    with mock.patch.object(torch.cuda.Stream, "wait_event", wait_and_be_late):
        yield
