"""Runs whose step is taken on the host: the states are there, in memory or in files, and the parameters where they were.

For a run on a device, a stream copies the gradient and the parameters to the host; the optimizer steps there; the stream copies the
parameters back. Meanwhile the next run is copied, and the disk reads and writes.

Worked example, runs c, b, a on a device, their states in files, one ahead

    copies      c out | b out      | c back, a out | b back  | a back
    host                c's step   | b's step      | a's step
    disk        c       b          | c back, a     | b back    a back
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.comm.streams import Event, streams_of
from ..mapped_file import MappedFile, WriteBehind, mapped
from ..policy import CPUOffloadPolicy, DiskOffloadPolicy
from ..torch_names import torch_tensors
from .runs import Run, is_elementwise
from .torch_names import step_unheard

State = dict[str, Any]
_HOST = (torch.device("cpu"), torch.device("cpu:0"))
"""Another CPU is the planner's device."""


class HostRun:
    """One run, and its copies on the host from when they are sent to the end of its step.

    data:  of the run, on a device or on the host
    state: of the optimizer for it
    file:  where the state is; None: in memory, or there is none yet. in_file: its entries there
    param_file: where ``data`` is; None: in memory
    """

    def __init__(self, run: Run, state: State, pin_memory: bool) -> None:
        self.data = run.data
        self.state = state
        self.file: MappedFile | None = None
        self.in_file: State = {}
        self.param_file: MappedFile | None = None
        self.is_sent = False
        self._is_here = run.data.device in _HOST
        self._pin_memory = pin_memory
        self._streams = streams_of(run.data.device)
        self._param = self.data if self._is_here else torch.empty(0, dtype=self.data.dtype, device="cpu")
        self._read: tuple[Tensor, ...] = ()  # by the copies to the host, which have not been waited for
        self._arrived: Event = None

    @torch.no_grad()
    def send(self) -> None:
        """Start to copy ``data`` and its gradient, as the current stream sees them; no-op if they are on their way or here."""
        grad = self.data.grad
        if self.is_sent or grad is None:
            return
        self.is_sent = True
        if self._is_here:
            return
        streams = self._streams
        streams.order(streams.offload, streams.mark(streams.compute))
        with streams.on(streams.offload):
            torch_tensors.set_data(self._param, self._to_host(self.data))
            if grad.dtype is not self._param.dtype:
                torch_tensors.allow_any_grad_dtype(self._param)
            self._param.grad = self._to_host(grad)
        self._arrived = streams.mark(streams.offload)
        self._read = (grad,)
        self.data.grad = None

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pin_memory)
        return host.copy_(tensor, non_blocking=self._pin_memory)

    def let_go(self) -> None:
        """Drop the gradient on the device: its memory goes back to the reduce stream, or to the current one, after the copy."""
        if self._read:
            for stream in (self._streams.reduce, self._streams.compute):
                self._streams.order(stream, self._arrived)
            self._read = ()

    def step(self, optimizer: Optimizer, options: dict[str, Any]) -> dict[str, Any]:
        """Step by ``optimizer``, which gets this run and ``options`` for it, and start to copy the result back; blocks the host.

        Afterwards the offload stream is after the copy back.
        Returns: the options as ``optimizer`` left them
        """
        self._streams.synchronize(self._arrived)
        group = {**options, "params": [self._param]}
        optimizer.param_groups = [group]
        optimizer.state = defaultdict(dict, {self._param: self.state})
        step_unheard(optimizer)
        self.state = optimizer.state[self._param]
        self.is_sent = False
        del group["params"]
        if not self._is_here:
            self._send_back()
        return group

    def _send_back(self) -> None:
        streams = self._streams
        with streams.on(streams.offload), torch.no_grad():
            self.data.copy_(self._param.detach(), non_blocking=self._pin_memory)  # the tensor stays the same object
        self._param.grad = None
        torch_tensors.set_data(self._param, torch.empty(0, dtype=self.data.dtype, device="cpu"))

    def values(self) -> State:
        """The entries of the state with a value for each element."""
        return {key: value for key, value in self.state.items() if is_elementwise(key, value, self.data) and value.numel() > 0}

    def move_state(self) -> None:
        """Move the state to the host, if it was loaded elsewhere."""
        self.state.update(self.state_at(torch.device("cpu")))

    def state_at(self, device: torch.device) -> State:
        return self.state | {key: value.to(device) for key, value in self.values().items()}


class HostStates:
    """The places of the runs' states between their steps, by ``policy``."""

    def __init__(self, policy: CPUOffloadPolicy | DiskOffloadPolicy) -> None:
        self.ahead = policy.read_ahead if isinstance(policy, DiskOffloadPolicy) else 1
        self.folder = os.fspath(policy.path) if isinstance(policy, DiskOffloadPolicy) else None
        self.files = WriteBehind(self.ahead)

    def ask_for(self, run: HostRun) -> None:
        """The turn of ``run`` comes soon."""
        for file in (run.file, run.param_file):
            if file is not None:
                self.files.ask_for(file)

    def put_back(self, run: HostRun) -> None:
        """``run`` was stepped, or loaded: put its states into its file, if they are not there, and have its files written."""
        if run.param_file is not None:
            self.files.write(run.param_file)
        if self.folder is None:
            return
        values = run.values()
        if not values:
            return
        if run.file is None or any(value is not run.in_file.get(key) for key, value in values.items()):
            run.file, copies = mapped(self.folder, values.values(), "optimizer state")
            places = {id(value): copy for value, copy in copies}
            run.in_file = {key: places[id(value)] for key, value in values.items()}
            run.state.update(run.in_file)
            self.files.ask_for(run.file)
        self.files.write(run.file)
