"""``record``: fingerprints of gathered parameters, reduced gradients and updated parameters of each step, for ``fsdp2 diff``.

It hears where units begin and where a backward ends from the collective log, as the ledger does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..arguments import COUNT, NATURAL, require
from ..checkpoint.model_tensors import cuts_of
from ..checkpoint.shard_geometry import Cut, Piece, pieces_of
from ..doctor.inspected import inspect
from ..inspect import Group, Listener
from ..torch_names import torch_dtensors
from .fingerprint import fingerprints
from .run_folder import Values, folder_of
from .step_lines import StepLines


def record(
    folder: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    every: int = 1,
    first_step: int = 1,
) -> Recording:
    """Write fingerprints of each step of this rank into ``folder``, until the end of the ``with`` block or until ``stop()``.

    folder:     one for a run, seen by all ranks or copied together; an earlier recording there is dropped
    optimizer:  one, or all that train it: the step of the last one ends a step; None: each step of any optimizer
    every:      record the first step, and each of this number
    first_step: number of the step that comes first; of a run that goes on, the next one
    Collective: no. In a recorded step each rank reads all gathered parameters once, and its shards twice
    Raises:     ModuleError if ``model`` is not sharded; ArgumentError for something else than optimizers, or an ``every`` below 1

    Example:
        with fsdp2.record(folder, model, optimizer):
            model(x).sum().backward()
            optimizer.step()
    """
    return Recording(folder, model, optimizer, every=every, first_step=first_step)


class Recording(StepLines, Listener):
    """What ``record`` returns."""

    def __init__(
        self,
        folder: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
        *,
        every: int,
        first_step: int,
    ) -> None:
        where = folder_of(folder, "record")
        inspected = inspect(model, optimizer, "record")
        require("record", COUNT, every=every)
        require("record", NATURAL, first_step=first_step)
        self._units = inspected.units
        self._every, self._step, self._first = every, first_step, first_step
        self._forward: dict[str, Values] = {}
        self._backward: dict[str, Values] = {}
        self._begun: list[str] = []  # units in the order of this backward
        self._at = ("", "")
        super().__init__("record", where)
        self._begin(self, inspected.optimizers)

    @property
    def _is_on(self) -> bool:
        return (self._step - self._first) % self._every == 0

    # --- moments of a step ---

    def begins(self, phase: str, unit: str) -> None:
        self._at = phase, unit
        if phase == "backward" and unit not in self._begun:
            self._begun.append(unit)

    def resumes(self) -> None:
        """A unit's parameters are gathered, and it runs next. Of several micro-batches the first one is recorded."""
        phase, name = self._at
        self._at = ("", "")
        if phase != "forward" or name in self._forward or not self._is_on or not torch.is_grad_enabled():
            return
        for unit in self._units:
            if unit.event_name() == name:
                self._forward |= _said(
                    (name, param.fqn, whole, _dtypes(group, whole))
                    for group in unit.groups
                    for param in group.params
                    if (whole := param.unsharded()) is not None
                ) or {name: {}}

    def leaves(self) -> None:
        """All gradients of this backward are reduced; of several in a step the last one's are kept."""
        if not self._begun or not self._is_on:
            self._begun.clear()
            return
        found = {unit.event_name(): unit for unit in self._units}
        order = [name for name in self._begun if name in found] + [name for name in found if name not in self._begun]
        self._begun.clear()
        self._backward = _said(
            (name, param.fqn, grad, _dtypes(group, grad))
            for name in order
            for group in found[name].groups
            for param in group.params
            if (grad := param.sharded.grad) is not None
        )

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_on:
            updated = _said(
                (unit.event_name(), param.fqn, param.sharded, _dtypes(group, param.sharded))
                for unit in self._units
                for group in unit.groups
                for param in group.params
            )
            phases = {"parameters": self._forward, "gradients": self._backward, "update": updated}
            self._lines.write({"step": self._step, "made_by": self._units[0].made_by, "torch": torch.__version__, **phases})
        self._forward, self._backward = {}, {}
        self._step += 1


def _dtypes(group: Group, value: Tensor) -> tuple[torch.dtype, ...]:
    """Those that a value went through: its own, that of computing, that of reducing."""
    return value.dtype, group.param_dtype, group.reduce_dtype


@functools.lru_cache
def _named(dtypes: tuple[torch.dtype, ...]) -> Values:
    """Their names, and the coarsest rounding unit."""
    names = " ".join(str(each).removeprefix("torch.") for each in dtypes)
    return {"dtypes": names, "eps": max(torch.finfo(each).eps for each in dtypes if each.is_floating_point)}


@functools.lru_cache(maxsize=4096)  # of two steps the same
def _pieces(shape: torch.Size, cuts: tuple[Cut, ...]) -> list[Piece]:
    return pieces_of(shape, cuts)


def _said(tensors: Iterable[tuple[str, str, Tensor, tuple[torch.dtype, ...]]]) -> Values:
    """The fingerprints of (unit, parameter, tensor, dtypes), by unit and parameter.

    replica: which of several copies this rank has a part of; all copies have numbers from 0
    """
    named, parts = [], []
    for unit, name, tensor, dtypes in tensors:
        local, replica = tensor, 0
        cuts: list[Cut] = []
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate() or ()
            local, cuts = torch_dtensors.local_tensor(tensor), cuts_of(tensor, coordinate)
            for axis, placement in enumerate(tensor.placements):
                if torch_dtensors.shard_dim(placement) is None:
                    replica = replica * tensor.device_mesh.size(axis) + coordinate[axis]
        named.append((unit, name, replica, dtypes))
        parts.append((local.detach(), tensor.shape, _pieces(tensor.shape, tuple(cuts))))
    found: Values = {}
    for (unit, name, replica, dtypes), made in zip(named, fingerprints(parts), strict=True):
        said = {"checksum": made.checksum, "squares": made.squares, "sketch": made.sketch, "replica": replica, **_named(dtypes)}
        found.setdefault(unit, {})[name] = said
    return found
