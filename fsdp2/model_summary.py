"""A model after ``fully_shard``, as a table: units and their parameters, dtypes, placements and bytes on this rank.

    print(fsdp2.summary(model, optimizer))

    FSDPGPT: 5 units over 2 ranks, 17,290 parameters
    unit                  module         parameters  dtypes               this rank  unsharded  padding  placement      after forward
    (root)                FSDPGPT               650  float32                1.34 kB    2.69 kB     3.3%  Shard(0) of 2  kept, as root
    blocks.0 to blocks.3  4 x FSDPBlock       4,160  float32 -> bfloat16    8.32 kB    8.32 kB     0.0%  Shard(0) of 2  resharded

Units that follow each other with equal figures share a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .core.group.param_group import ParamGroup
from .core.iteration.module_state import ModuleState, unit_of
from .core.plan.mesh import DataParallelMesh
from .errors import ArgumentError, ModuleError, got, got_object
from .printable import counted, in_bytes
from .state_bytes import StateBytes, measured_state_bytes
from .tables import Table

_HEADINGS = ("unit", "module", "parameters", "dtypes", "this rank", "unsharded", "padding", "placement", "after forward")


@dataclass(frozen=True)
class UnitSummary:
    """One call of ``fully_shard``.

    name:             of its first module, from the model that was asked about; "" is that model
    module:           the class, or classes
    numel:            parameters, whole
    dtypes:           of each group: stored, computed with if that differs, and reduced in if that differs
    sharded_nbytes:   of the flat shards on this rank, with padding
    unsharded_nbytes: while the unit is unsharded
    padding:          of the flat shards, the part that holds nothing
    placement:        how this is cut, over how many ranks
    after_forward:    "resharded", "kept", or "over N ranks"; "kept, as root" where nobody decided about the model itself
    """

    name: str
    module: str
    numel: int
    dtypes: str
    sharded_nbytes: int
    unsharded_nbytes: int
    padding: float
    placement: str
    after_forward: str


@dataclass(frozen=True)
class ModelSummary:
    """The units of a model in the order of ``named_modules()``; ``str()`` and rich show it as a table.

    model:     the class
    num_ranks: that hold different shards or replicas
    units:     one for each ``fully_shard`` call
    unsharded: names of parameters that no call took
    state:     bytes that this rank keeps
    """

    model: str
    num_ranks: int
    units: Sequence[UnitSummary]
    unsharded: Sequence[str]
    state: StateBytes

    @property
    def headline(self) -> str:
        numel = sum(unit.numel for unit in self.units)
        return f"{self.model}: {counted(len(self.units), 'unit')} over {counted(self.num_ranks, 'rank')}, {numel:,} parameters"

    @property
    def footer(self) -> list[str]:
        lines = []
        if self.unsharded:
            shown = ", ".join(self.unsharded[:3]) + (", ..." if len(self.unsharded) > 3 else "")
            lines.append(f"not sharded: {counted(len(self.unsharded), 'parameter')} ({shown})")
        state = self.state
        parts = [
            ("parameters", state.master),
            ("gradients", state.gradients),
            ("optimizer", state.optimizer),
            ("unsharded", state.compute),
        ]
        lines.append("this rank keeps now: " + ", ".join(f"{name} {in_bytes(nbytes)}" for name, nbytes in parts if nbytes))
        return lines

    @property
    def table(self) -> Table:
        return Table(self.headline, _HEADINGS, tuple(_rows(self.units)), "\n".join(self.footer), left=(0, 1, 3, 7, 8))

    def __str__(self) -> str:
        return str(self.table).replace("\n  ", "\n")

    def __rich__(self) -> Table:
        return self.table


def summary(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> ModelSummary:
    """Units of ``model`` with their parameters, dtypes, placements and bytes; with ``optimizer``, the bytes of its state as well.

    Collective: no. Ranks see their own shards, which may differ by padding only.
    Raises:     ModuleError if ``model`` is no module; ArgumentError if ``optimizer`` is no optimizer

    Example:
        print(fsdp2.summary(model, optimizer))
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ModuleError(got_object("summary", model), expected="an nn.Module, sharded or not", fix="pass the model itself")
    given = optimizer
    if not isinstance(given, (torch.optim.Optimizer, type(None))):
        raise ArgumentError(got("summary", "optimizer", optimizer), expected="a torch.optim.Optimizer, or None", fix="leave it out")
    units: dict[ModuleState, str] = {}
    for name, module in model.named_modules():
        unit = unit_of(module)
        if unit is not None:
            units.setdefault(unit, name)
    taken = {id(param.sharded) for unit in units for group in unit.uses for param in group.params}
    taken |= {id(param.unsharded) for unit in units for group in unit.uses for param in group.params}
    ranks = frozenset[int]().union(*(group.mesh.ranks for unit in units for group in unit.groups))
    return ModelSummary(
        model=type(model).__name__,
        num_ranks=max(len(ranks), 1),
        units=[_unit_summary(name, unit) for unit, name in units.items()],
        unsharded=[name for name, param in model.named_parameters() if id(param) not in taken],
        state=measured_state_bytes(model, optimizer),
    )


def _unit_summary(name: str, unit: ModuleState) -> UnitSummary:
    layouts = [(group.plan.layout, group.plan.dtype.itemsize) for group in unit.groups]
    sharded_nbytes = sum(layout.shard_numel * itemsize for layout, itemsize in layouts)
    padding_nbytes = sum(slot.gap * itemsize for layout, itemsize in layouts for slot in layout.slots)
    return UnitSummary(
        name=name,
        module=" + ".join(type(module).__name__ for module in unit.modules),
        numel=sum(math.prod(param.spec.cut.shape) for group in unit.groups for param in group.params),
        dtypes=_joined(_dtypes(group) for group in unit.groups),
        sharded_nbytes=sharded_nbytes,
        unsharded_nbytes=sum(group.plan.unsharded_nbytes for group in unit.groups),
        padding=padding_nbytes / sharded_nbytes if sharded_nbytes else 0.0,
        placement=_joined(_placement(group) for group in unit.groups),
        after_forward=_after_forward(name, unit),
    )


def _dtypes(group: ParamGroup) -> str:
    stored, computed, reduced = (
        str(dtype).removeprefix("torch.") for dtype in (group.plan.dtype, group.plan.param_dtype, group.plan.reduce_dtype)
    )
    text = stored if computed == stored else f"{stored} -> {computed}"
    return text if reduced == computed else f"{text}, reduced in {reduced}"


def _placement(group: ParamGroup) -> str:
    dims = sorted({param.spec.cut.dim for param in group.params if param.spec.cut.dim is not None})
    mesh: DataParallelMesh = group.mesh
    shards = f"Shard({', '.join(map(str, dims))}) of {mesh.shard_size}" if mesh.shard_axis is not None else ""
    replicas = f"{mesh.replicate_size} replicas" if mesh.replicate_axis is not None else ""
    return " x ".join(part for part in (replicas, shards) if part) + (", in host memory" if group.options.offload else "")


def _after_forward(name: str, unit: ModuleState) -> str:
    options = unit.options
    if options.reshard_is_default and not name:
        return "kept, as root"
    if isinstance(options.reshard_after_forward, bool):
        return "resharded" if options.reshard_after_forward else "kept"
    return f"over {options.reshard_after_forward} ranks"


def _rows(units: Sequence[UnitSummary]) -> list[tuple[str, ...]]:
    """The cells of the table; units that follow each other and differ by name only share a row."""
    rows: list[tuple[str, ...]] = []
    for _, equal in itertools.groupby(units, key=lambda unit: replace(unit, name="" if unit.name else "root")):
        alike = list(equal)
        unit = alike[0]
        rows.append(
            (
                _names([each.name for each in alike]),
                unit.module if len(alike) == 1 else f"{len(alike)} x {unit.module}",
                f"{unit.numel:,}",
                unit.dtypes,
                in_bytes(unit.sharded_nbytes),
                in_bytes(unit.unsharded_nbytes),
                f"{unit.padding:.1%}",
                unit.placement,
                unit.after_forward,
            )
        )
    return rows


def _names(names: Sequence[str]) -> str:
    return (names[0] or "(root)") if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))
