"""Copies of this rank's shards in host memory, to be written while training goes on, or to be filled before anything is changed.

They are page-locked if the shards lie on a device, so that the copies overlap each other.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core import torch_compat as compat
from .dcp_strided import tell_chunks
from .named_state import map_values


def host_copy(state: Any, *, shared: bool = False) -> Any:
    """``state`` with every tensor copied; of a DTensor, this rank's part. Waits for the device. Collective: no.

    shared: tensors that are in host memory are not copied: for a caller that has finished before they change
    Memory: this rank's part of ``state``, in host memory
    """
    devices: set[torch.device] = set()

    def copied(value: Any) -> Any:
        if isinstance(value, DTensor):
            return tell_chunks(compat.new_dtensor(copied(compat.local_tensor(value)), compat.spec_of(value)))
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if shared and value.device.type == "cpu":
            return value.detach()
        devices.add(value.device)
        return _host_space(value).copy_(value.detach(), non_blocking=True)

    result = map_values(copied, state)
    for device in devices:
        if device.type != "cpu":
            compat.device_module(device.type).current_stream(device).synchronize()
    return result


def host_space(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Host memory for this rank's part of ``like``, not written."""
    if isinstance(like, DTensor):
        spec = compat.spec_of(like)
        assert spec.tensor_meta is not None
        local = host_space(compat.local_tensor(like), dtype)
        return compat.new_dtensor(local, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype)))
    return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)


def _host_space(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=like.device.type != "cpu")
