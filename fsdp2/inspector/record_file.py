"""``record``: fingerprints of gathered parameters, reduced gradients and updated parameters of each step, for ``fsdp2 diff``.

It hears where units begin and where a backward ends from the collective log, as the ledger does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..arguments import COUNT, require
from ..checkpoint.model_tensors import cuts_of
from ..checkpoint.shard_geometry import Cut, pieces_of
from ..inspect import Group, Listener, Parameter, Unit
from ..torch_names import torch_dtensors
from .fingerprint import Fingerprints, Run, runs_of
from .run_folder import Values
from .step_lines import StepLines


class record(StepLines, Listener):  # noqa: N801 (called as a function is)
    """Write fingerprints of each step of this rank into ``folder``, until the end of the ``with`` block or until ``stop()``.

    folder:     one for a run, seen by all ranks or copied together; an earlier recording there is dropped
    optimizer:  one, or all that train it: the step of the last one ends a step; None: each step of any optimizer
    every:      record the first step, and each of this number
    first_step: number of the step that comes first; of a run that goes on, the next one
    Collective: no. In a recorded step each rank reads all gathered parameters once, and its shards twice
    Raises:     ModuleError if ``model`` is not sharded; ArgumentError for something else than optimizers, or an ``every`` below 1;
                OrderError while another recording writes into ``folder``

    Example:
        with fsdp2.record(folder, model, optimizer):
            model(x).sum().backward()
            optimizer.step()
    """

    def __init__(
        self,
        folder: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        every: int = 1,
        first_step: int = 1,
    ) -> None:
        require("record", COUNT, every=every)
        self._every, self._first = every, first_step
        self._places: dict[tuple[bool, str], _Place] = {}
        self._at = ("", "")
        self._begin_step()
        super().__init__("record", folder, model, optimizer, first_step, self)

    def _begin_step(self) -> None:
        """``_noted``: (phase, unit, parameter, what its line says) of each of ``_made``. Phase: a name; of gradients which backward"""
        self._made = Fingerprints()
        self._noted: list[tuple[str | int, str, str, Values]] = []
        self._by_name: dict[str, Unit] = {}
        self._gathered: set[str] = set()
        self._begun: dict[str, None] = {}  # units in the order of this backward
        self._num_backwards = 0

    @property
    def _is_on(self) -> bool:
        return (self._step - self._first) % self._every == 0

    # --- moments of a step ---

    def begins(self, phase: str, unit: str) -> None:
        self._at = phase, unit
        if phase == "backward":
            self._begun[unit] = None

    def resumes(self) -> None:
        """A unit's parameters are gathered, and it runs next. Of several micro-batches the first one is recorded."""
        phase, name = self._at
        self._at = ("", "")
        if phase == "forward" and name not in self._gathered and self._is_on and torch.is_grad_enabled():
            self._gathered.add(name)
            self._note("parameters", [name], lambda param: param.unsharded())

    def leaves(self) -> None:
        """All gradients of this backward are reduced; of several in a step the last one's are kept."""
        if self._begun and self._is_on:
            self._num_backwards += 1
            self._note(self._num_backwards, dict.fromkeys([*self._begun, *self._named()]), lambda param: param.sharded.grad)
        self._begun = {}

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_on:
            self._note("update", self._named(), lambda param: param.sharded)
            found: dict[str | int, Values] = {}
            for (phase, unit, name, said), made in zip(self._noted, self._made.all(), strict=True):
                sums = {"checksum": made.checksum, "squares": made.squares, "sketch": made.sketch}
                found.setdefault(phase, {}).setdefault(unit, {})[name] = sums | said
            phases: dict[str, str | int] = {"parameters": "parameters", "gradients": self._num_backwards, "update": "update"}
            values = {phase: found.get(noted, {}) for phase, noted in phases.items()}
            self._lines.write({"step": self._step, "made_by": self._inspected.units[0].made_by, "torch": torch.__version__, **values})
        self._step += 1
        self._begin_step()

    def _named(self) -> dict[str, Unit]:
        """The units by the names that events of this step have."""
        self._by_name = self._by_name or {unit.event_name(): unit for unit in self._inspected.units}
        return self._by_name

    def _note(self, phase: str | int, names: Iterable[str], value_of: Callable[[Parameter], Tensor | None]) -> None:
        """Take the fingerprints of what the units' parameters have now, and note whose they are."""
        units, parts, is_whole = self._named(), [], phase == "parameters"
        for name in names:
            for group in units[name].groups if name in units else ():
                for param in group.params:
                    if (value := value_of(param)) is not None:
                        place = self._places.get((is_whole, param.fqn))
                        if place is None or place.facts != _facts(value):
                            place = self._places[is_whole, param.fqn] = _Place.of(value, group)
                        parts.append((torch_dtensors.local_tensor(value) if isinstance(value, DTensor) else value, place.runs))
                        self._noted.append((phase, name, param.fqn, place.said))
        self._made.take(parts)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies and what it went through: what a line says of it in each step.

    said: the names of its own dtype, that of computing and that of reducing; the coarsest rounding unit of these; and which of several
          copies this rank has a part of: all copies have numbers from 0
    """

    facts: tuple[Any, ...]
    runs: list[Run]
    said: Values

    @classmethod
    def of(cls, value: Tensor, group: Group) -> _Place:
        dtypes = value.dtype, group.param_dtype, group.reduce_dtype
        replica, cuts = 0, list[Cut]()
        if isinstance(value, DTensor):
            coordinate = value.device_mesh.get_coordinate() or ()
            cuts = cuts_of(value, coordinate)
            for axis, placement in enumerate(value.placements):
                if torch_dtensors.shard_dim(placement) is None:
                    replica = replica * value.device_mesh.size(axis) + coordinate[axis]
        said = {
            "dtypes": " ".join(str(each).removeprefix("torch.") for each in dtypes),
            "eps": max(torch.finfo(each).eps for each in dtypes if each.is_floating_point),
            "replica": replica,
        }
        return cls(_facts(value), runs_of(value.shape, pieces_of(value.shape, cuts)), said)


def _facts(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.placements if isinstance(value, DTensor) else ()
