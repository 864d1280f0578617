"""Two backends of ``torch.distributed`` for the device: ``pretend`` between processes, and ``pretend_model`` within one.

Both are ordered by streams, coalesce, average (AVG, PREMUL_SUM) in NCCL's arithmetic, and run the collectives of a group in the order
of issue. NCCL rounds an average's factor to the dtype of the inputs, and reads a bf16 PREMUL_SUM's wrongly.
*Between processes* bytes travel through gloo, and ranks that issue different collectives raise an error that says both. *Modeled*,
one process plays rank r of any number of ranks, which gather its data and reduce multiples of it: what arrives is finite and equal in
every run, which is enough to see a race, at any world size.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.comm.backends import declare_backend
from . import torch_names
from .build import extension

BACKEND = "pretend"
MODEL = "pretend_model"


def _between_processes(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    wire = torch_names.gloo(store, rank, size, timeout)
    return extension().make_group(wire, rank, size)


def _within_one(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return extension().make_group(None, rank, size)


def register_backends(device_type: str) -> None:
    """Once a process."""
    for name, make in ((BACKEND, _between_processes), (MODEL, _within_one)):
        dist.Backend.register_backend(name, make, devices=[device_type])
        declare_backend(name, averages=True)


__all__ = ["BACKEND", "MODEL", "register_backends"]
