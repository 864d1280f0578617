"""A flat optimizer whose states are in files: it steps run by run, while the next run's are read and the last one's written.

Source: ZeRO-Infinity (Rajbhandari et al. 2021), section 5.1.1; the fraction is ZeRO-Offload++'s twin flow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, DeviceError
from .flat import FlatOptimizer
from .runs import Run, is_elementwise
from .state_files import StateFile, WriteBehind


@dataclass(frozen=True)
class DiskOffloadPolicy:
    """Optimizer states live in files.

    path:       a folder on a local disk, that exists; ranks of a host may share it
    fraction:   of the elements, those whose states are there; the others' stay in memory
    read_ahead: how many runs are read before their turn, and how many may be on their way back
    """

    path: str | os.PathLike[str]
    fraction: float = 1.0
    read_ahead: int = 1


def offloaded(
    optimizer_class: type[Optimizer],
    params: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
    policy: DiskOffloadPolicy,
    **options: Any,
) -> OffloadedOptimizer:
    """As ``flat``, with the states of parameters where ``policy`` says; every value is the ordinary optimizer's.

    Memory:     beside what stays, the states of 1 + 2 ``read_ahead`` runs; a run is a group's parameters of one kind at most
    Collective: no, nor is its ``step``
    Raises:     as ``flat``; ArgumentError for a folder that is none. DeviceError at the first step if parameters are not on the host;
                FSDPError if the disk has no room
    """
    listed = list(params.parameters()) if isinstance(params, nn.Module) else list(params)
    return OffloadedOptimizer(optimizer_class, listed, checked_policy(policy), options)


def checked_policy(policy: Any) -> DiskOffloadPolicy:
    """Raises: ArgumentError if it is none, or says what cannot be."""
    if not isinstance(policy, DiskOffloadPolicy):
        raise ArgumentError(
            f"offloaded got policy={policy!r}",
            expected="a DiskOffloadPolicy",
            fix='offloaded(AdamW, model, DiskOffloadPolicy("/scratch"))',
        )
    path: Any = policy.path
    fraction: Any = policy.fraction
    read_ahead: Any = policy.read_ahead
    for name, value, expected, is_fine in (
        ("path", path, "a folder that exists, and that this process may write to", os.path.isdir(path) and os.access(path, os.W_OK)),
        ("fraction", fraction, "a number from 0 to 1", isinstance(fraction, (int, float)) and 0 <= fraction <= 1),
        ("read_ahead", read_ahead, "an int, 0 or more", isinstance(read_ahead, int) and read_ahead >= 0),
    ):
        if not is_fine:
            raise ArgumentError(f"DiskOffloadPolicy got {name}={value!r}", expected=expected, fix=f"pass another {name}")
    return policy


class OffloadedOptimizer(FlatOptimizer):
    """See ``offloaded``."""

    _steps_at_once = False

    def __init__(
        self, optimizer_class: type[Optimizer], params: list[Any], policy: DiskOffloadPolicy, options: Mapping[str, Any]
    ) -> None:
        self.policy = policy
        self.files = WriteBehind(policy.read_ahead)
        self._file_of: dict[Tensor, StateFile] = {}  # by the data of a run
        super().__init__(optimizer_class, params, options)

    def __repr__(self) -> str:
        return f"Offloaded{self._class.__name__}" + super().__repr__().removeprefix(f"Flat{self._class.__name__}")

    def _step(self, inner: Optimizer) -> None:
        """Run by run, each in a step of the inner optimizer that sees no others."""
        order = self._on_disk()
        self._forget_others(order)
        groups = inner.param_groups
        position = 0
        try:
            for group, runs in zip(groups, self._runs, strict=True):
                before = dict(group)
                for run in runs:
                    if run.data in order:
                        for file in map(self._file_of.get, list(order)[position : position + 1 + self.policy.read_ahead]):
                            if file is not None:
                                self.files.ask_for(file)
                        position += 1
                    inner.param_groups = [{**before, "params": [run.data]}]
                    inner.step()
                    group.update({key: value for key, value in inner.param_groups[0].items() if key != "params"})
                    if run.data in order:
                        self._write_behind(inner, run)
        finally:
            inner.param_groups = groups
        self.files.wait()

    def _on_disk(self) -> dict[Tensor, None]:
        """Data of the runs whose states are, the first ones, in the order of their turn."""
        runs = [run for runs in self._runs for run in runs]
        left = self.policy.fraction * sum(run.data.numel() for run in runs)
        found: dict[Tensor, None] = {}
        for run in runs:
            if left <= 0:
                break
            left -= run.data.numel()
            found[run.data] = None
        return found

    def _forget_others(self, order: Mapping[Tensor, None]) -> None:
        """Runs were cut: the parts get files of their own."""
        for data in [data for data in self._file_of if data not in order]:
            del self._file_of[data]

    def _write_behind(self, inner: Optimizer, run: Run) -> None:
        """Put the states of ``run`` into its file, if they are not there, and have it written."""
        state = inner.state.get(run.data, {})
        values = {key: value for key, value in state.items() if is_elementwise(key, value, run.data) and value.numel() > 0}
        if not values:
            return
        file = self._file_of.get(run.data)
        if file is None or any(value is not file.tensors.get(key) for key, value in values.items()):
            file = self._file_of[run.data] = StateFile(os.fspath(self.policy.path), values)
            state.update(file.tensors)
            self.files.ask_for(file)
        self.files.write(file)

    @torch.no_grad()
    def _rebuild(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        super()._rebuild(state)
        self._file_of.clear()
        inner = self._inner
        assert inner is not None
        devices = {run.data.device.type for runs in self._runs for run in runs}
        if devices - {"cpu"}:
            raise DeviceError(
                f"offloaded got parameters on {sorted(devices)}",
                expected="parameters on the host, where the optimizer then steps",
                fix="fully_shard(..., offload_policy=CPUOffloadPolicy())",
            )
        order = self._on_disk()
        for run in (run for runs in self._runs for run in runs if run.data in order):
            self._write_behind(inner, run)
        self.files.wait()
