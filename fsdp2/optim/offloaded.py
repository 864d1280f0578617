"""A flat optimizer that steps on the host, run by run, and has its states there, in memory or in files.

The parameters may be on a device, or on the host as well. It refuses to know how a run is copied, and how a file is read.

Source: ZeRO-Offload (Ren et al. 2021), section 4; ZeRO-Infinity (Rajbhandari et al. 2021), section 5.1.1; the fraction is
ZeRO-Offload++'s twin flow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.comm.agreement import agree_on_meshes
from ..core.comm.streams import streams_of
from ..core.group.param import as_sharded
from ..errors import ArgumentError, FSDPError
from ..policy import CPUOffloadPolicy, DiskOffloadPolicy, TorchCPUOffloadPolicy
from .flat import FlatOptimizer
from .host_runs import HostRun, HostStates
from .state_files import check_folder


def offloaded(
    optimizer_class: type[Optimizer],
    params: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
    policy: CPUOffloadPolicy | DiskOffloadPolicy,
    *,
    fraction: float = 1.0,
    **options: Any,
) -> OffloadedOptimizer:
    """As ``flat``, with the states of parameters where ``policy`` says; every value is the ordinary optimizer's.

    policy:     CPUOffloadPolicy: in host memory; DiskOffloadPolicy: in files. The optimizer steps on the host, the parameters stay
                where ``fully_shard`` has put them
    fraction:   of the elements, those whose states are there; the others' stay beside their parameters. The units are chosen whose
                gradients backward has first: the last ones of the model
    Memory:     on the host, beside the states, the gradients and parameters of two runs that are on their way; with files, of the
                states those of 1 + 2 ``read_ahead`` runs. A run is a group's parameters of one kind at most
    Collective: yes, over the meshes of the parameters: all ranks go on or raise. Its ``step`` is not
    Raises:     as ``flat``; ArgumentError for a folder that takes no files; FSDPError in a step if the disk has no room
    """
    listed = list(params.parameters()) if isinstance(params, nn.Module) else list(params)
    problem: FSDPError | None = None
    try:
        check_policy(policy)
        _check_fraction(fraction)
    except FSDPError as error:
        problem = error
    agree_on_meshes(_meshes_of(listed), problem)
    return OffloadedOptimizer(optimizer_class, listed, policy, fraction, options)


def check_policy(policy: Any) -> None:
    """Raises: ArgumentError if it is none, or says what cannot be."""
    if not isinstance(policy, (TorchCPUOffloadPolicy, DiskOffloadPolicy)):
        raise ArgumentError(
            f"offloaded got policy={policy!r}",
            expected="a CPUOffloadPolicy or a DiskOffloadPolicy",
            fix='offloaded(AdamW, model, DiskOffloadPolicy("/scratch"))',
        )
    if isinstance(policy, DiskOffloadPolicy):
        read_ahead: Any = policy.read_ahead
        if not isinstance(read_ahead, int) or read_ahead < 0:
            raise ArgumentError(
                f"DiskOffloadPolicy got read_ahead={read_ahead!r}", expected="an int, 0 or more", fix="pass another read_ahead"
            )
        check_folder(os.fspath(policy.path))


def _check_fraction(fraction: Any) -> None:
    if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise ArgumentError(f"offloaded got fraction={fraction!r}", expected="a number from 0 to 1", fix="pass another fraction")


def _meshes_of(listed: list[Any]) -> list[Any]:
    """Of the sharded ones among what an optimizer is given."""
    groups = [each["params"] if isinstance(each, dict) else [each] for each in listed]
    tensors = [tensor for group in groups for tensor in ([group] if isinstance(group, Tensor) else group)]
    params = as_sharded([tensor[1] if isinstance(tensor, tuple) else tensor for tensor in tensors])
    return list(dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)))


class OffloadedOptimizer(FlatOptimizer):
    """See ``offloaded``."""

    _steps_at_once = False

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: list[Any],
        policy: CPUOffloadPolicy | DiskOffloadPolicy,
        fraction: float,
        options: Mapping[str, Any],
    ) -> None:
        self.policy = policy
        self.fraction = fraction
        self.states = HostStates(policy)
        self._host_runs: dict[Tensor, HostRun] = {}  # by the data of a run, in the order of their turns
        self._stepper: Optimizer | None = None  # of the class, which is given one run after another
        super().__init__(optimizer_class, params, options)

    def __repr__(self) -> str:
        return f"Offloaded{self._class.__name__}" + super().__repr__().removeprefix(f"Flat{self._class.__name__}")

    def _step(self, inner: Optimizer) -> None:
        """The runs whose states stayed in one step of the inner optimizer, the others one by one."""
        self._choose(inner)
        groups = inner.param_groups
        before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        group_of = {run.data: index for index, runs in enumerate(self._runs) for run in runs}
        turns = [run for run in self._host_runs.values() if run.data.grad is not None]
        after: dict[int, dict[str, Any]] = {}
        self._look_ahead(turns, 0)  # beside the step of the others
        self._step_others(inner)
        for position, run in enumerate(turns):
            self._look_ahead(turns, position)
            index = group_of[run.data]
            after[index] = self._step_one(inner, run, before[index])
        for index, options in after.items():
            groups[index].update(options)
        for device in {run.data.device for run in turns}:
            streams = streams_of(device)
            streams.order(streams.compute, streams.mark(streams.offload))
        for run in turns:
            run.let_go()
        self.states.files.wait()

    def _look_ahead(self, turns: list[HostRun], position: int) -> None:
        for run in turns[position : position + 1 + self.states.ahead]:
            self.states.ask_for(run)
        for run in turns[position : position + 2]:
            run.send()

    def _step_others(self, inner: Optimizer) -> None:
        """Those whose states stayed beside their parameters."""
        groups = inner.param_groups
        inner.param_groups = [
            {**group, "params": [data for data in group["params"] if data not in self._host_runs]} for group in groups
        ]
        try:
            inner.step()
        finally:
            for group, stepped in zip(groups, inner.param_groups, strict=True):
                group.update({key: value for key, value in stepped.items() if key != "params"})
            inner.param_groups = groups

    def _step_one(self, inner: Optimizer, run: HostRun, options: dict[str, Any]) -> dict[str, Any]:
        if self._stepper is None:
            self._stepper = self._class([torch.zeros(1)], **self._options)
        after = run.step(self._stepper, options)
        inner.state[run.data] = run.state
        self.states.put_back(run)
        return after

    def _choose(self, inner: Optimizer) -> None:
        """The runs whose states are offloaded; those that were cut since get files of their own."""
        known, self._host_runs = self._host_runs, {}
        runs = [run for runs in self._runs for run in runs][::-1]
        left = self.fraction * sum(run.data.numel() for run in runs)
        pin_memory = getattr(self.policy, "pin_memory", True)
        for run in runs:
            if left <= 0:
                break
            left -= run.data.numel()
            found = known.get(run.data)
            if found is None:
                found = HostRun(run, inner.state.get(run.data, {}), pin_memory)
                found.move_state()
            self._host_runs[run.data] = found

    @torch.no_grad()
    def _rebuild(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        super()._rebuild(state)
        self._host_runs.clear()
        inner = self._inner
        assert inner is not None
        self._choose(inner)
        for run in self._host_runs.values():
            self.states.put_back(run)
        self.states.files.wait()
