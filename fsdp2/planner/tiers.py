"""Where a plan's parameters and states lie: on the device, on the host or in files, which a rehearsal does not make.

While parts of the state are offloaded, the rehearsal's device is a second CPU, which tensors without memory may name: copies between it
and the host are copies then, as between a device and its host.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from ..errors import ArgumentError
from ..inspect import units
from ..mapped_file import nbytes_in_file
from ..optim import FlatOptimizer, OffloadedOptimizer, offloaded
from ..optim.host_runs import HostRun
from ..policy import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy
from .memory import FileBytes, rounded_to_power_of_two

Offload = bool | Literal["optimizer", "optimizer-disk", "disk"]
OFFLOADS: dict[Offload, str] = {
    False: "nothing",
    True: "parameters, gradients and optimizer state in host memory",
    "optimizer": "the optimizer's state in host memory",
    "optimizer-disk": "the optimizer's state in files",
    "disk": "parameters and the optimizer's state in files",
}
"""What each keeps off the device."""
READ_AHEAD = DiskOffloadPolicy("").read_ahead
"""Of files, what a policy does by itself."""

_IN_MEMORY = CPUOffloadPolicy(pin_memory=False)


def device_of(offload: Offload) -> torch.device:
    """That of activations and unsharded parameters; the host is ``torch.device("cpu")``."""
    return torch.device("cpu:1" if offload else "cpu")


def device_by_default(offload: Offload) -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors for which the user's code names no device are on that of ``device_of``."""
    return device_of(offload) if offload else contextlib.nullcontext()


def policy_of_parameters(offload: Offload) -> OffloadPolicy:
    return _IN_MEMORY if offload in (True, "disk") else OffloadPolicy()


def offload_by(optimizer: torch.optim.Optimizer, offload: Offload) -> Offload:
    """``offload``, or where the optimizer itself keeps its states."""
    if offload or not isinstance(optimizer, OffloadedOptimizer):
        return offload
    return "optimizer-disk" if isinstance(optimizer.policy, DiskOffloadPolicy) else "optimizer"


def with_states_there(optimizer: torch.optim.Optimizer, offload: Offload) -> torch.optim.Optimizer:
    """``optimizer``, or one of its class that keeps its states where ``offload`` says; those of files in memory.

    Raises: ArgumentError if ``offloaded`` refuses the class, and for an optimizer that steps in backward
    """
    if offload in ("optimizer", "optimizer-disk", "disk") and not isinstance(optimizer, OffloadedOptimizer):
        made = optimizer.optimizer_class if isinstance(optimizer, FlatOptimizer) else type(optimizer)
        return offloaded(made, optimizer.param_groups, _IN_MEMORY, **options_of(optimizer))
    if isinstance(optimizer, OffloadedOptimizer):
        if optimizer.steps_in_backward:
            raise ArgumentError(
                "plan got an optimizer that steps in backward",
                expected="one that steps when it is told to: what a thread of its own does is not rehearsed",
                fix="plan without step_in_backward: it needs no more memory with it",
            )
        optimizer.states.folder = None
    return optimizer


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """That its class was called with."""
    if isinstance(optimizer, FlatOptimizer):
        return optimizer.options
    taken = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in taken}


def host_runs_of(optimizer: torch.optim.Optimizer) -> list[HostRun]:
    return optimizer.host_runs if isinstance(optimizer, OffloadedOptimizer) else []


def files_of(model: nn.Module, optimizer: torch.optim.Optimizer, offload: Offload) -> FileBytes:
    """Forward and backward have the files of 2 + READ_AHEAD units in memory, and page-locked copies of two; a step has the files of
    1 + 2 READ_AHEAD runs.
    """
    if offload not in ("optimizer-disk", "disk"):
        return FileBytes()
    flats = [storage.nbytes() for storage in _shards(model)] if offload == "disk" else []
    states = [nbytes_in_file(run.values().values()) for run in host_runs_of(optimizer)]
    params = [run.data.nbytes if offload == "disk" else 0 for run in host_runs_of(optimizer)]
    in_step = sum(sorted(map(sum, zip(states, params, strict=True)), reverse=True)[: 1 + 2 * READ_AHEAD])
    largest = sorted(flats, reverse=True)
    in_backward = sum(largest[: 2 + READ_AHEAD]) + sum(map(rounded_to_power_of_two, largest[:2]))
    return FileBytes(sum(flats) + sum(states), max(in_step, in_backward))


def storages_in_files(model: nn.Module, optimizer: torch.optim.Optimizer, offload: Offload) -> Iterable[torch.UntypedStorage]:
    if offload == "disk":
        yield from _shards(model)
    if offload in ("optimizer-disk", "disk"):
        yield from (value.untyped_storage() for run in host_runs_of(optimizer) for value in run.values().values())


def _shards(model: nn.Module) -> list[torch.UntypedStorage]:
    groups = [group for unit in units(model) for group in unit.groups]
    return [storage for group in groups for kind, storage in group.memory() if kind == "parameters"]
