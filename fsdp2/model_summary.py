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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .errors import ArgumentError, ModuleError, got, got_object
from .inspect import Group, Unit, units
from .printable import counted, in_bytes
from .state_bytes import StateBytes, measured_state_bytes
from .tables import Shown, Table

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


@dataclass(frozen=True, repr=False)
class ModelSummary(Shown):
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
    found = units(model)
    params = [param for unit in found for group in (*unit.groups, *unit.borrowed) for param in group.params]
    taken = {id(each) for param in params for each in (param.sharded, param.unsharded())}
    ranks = frozenset[int]().union(*(group.ranks for unit in found for group in unit.groups))
    return ModelSummary(
        model=type(model).__name__,
        num_ranks=max(len(ranks), 1),
        units=[_unit_summary(unit) for unit in found],
        unsharded=[name for name, param in model.named_parameters() if id(param) not in taken],
        state=measured_state_bytes(model, optimizer),
    )


def _unit_summary(unit: Unit) -> UnitSummary:
    sharded_nbytes = sum(group.sharded_nbytes for group in unit.groups)
    return UnitSummary(
        name=unit.name,
        module=" + ".join(type(module).__name__ for module in unit.modules),
        numel=sum(param.numel for group in unit.groups for param in group.params),
        dtypes=_joined(map(_dtypes, unit.groups)),
        sharded_nbytes=sharded_nbytes,
        unsharded_nbytes=sum(group.unsharded_nbytes for group in unit.groups),
        padding=sum(group.padding_nbytes for group in unit.groups) / sharded_nbytes if sharded_nbytes else 0.0,
        placement=_joined(map(_placement, unit.groups)),
        after_forward=_after_forward(unit),
    )


def _dtypes(group: Group) -> str:
    stored, computed, reduced = (str(dtype).removeprefix("torch.") for dtype in (group.dtype, group.param_dtype, group.reduce_dtype))
    text = stored if computed == stored else f"{stored} -> {computed}"
    return text if reduced == computed else f"{text}, reduced in {reduced}"


def _placement(group: Group) -> str:
    dims = sorted({param.dim for param in group.params if param.dim is not None})
    shards = f"Shard({', '.join(map(str, dims))}) of {group.num_shards}" if group.num_shards is not None else ""
    replicas = f"{group.num_replicas} replicas" if group.num_replicas is not None else ""
    return " x ".join(part for part in (replicas, shards) if part) + (", in host memory" if group.is_offloaded else "")


def _after_forward(unit: Unit) -> str:
    if unit.is_kept_as_root and not unit.name:
        return "kept, as root"
    if isinstance(unit.reshard_after_forward, bool):
        return "resharded" if unit.reshard_after_forward else "kept"
    return f"over {unit.reshard_after_forward} ranks"


def _rows(units: Sequence[UnitSummary]) -> list[tuple[str, ...]]:
    """The cells of the table; units that follow each other and differ by name only share a row."""
    rows: list[tuple[str, ...]] = []
    for _, equal in itertools.groupby(units, key=lambda unit: replace(unit, name="" if unit.name else "root")):
        same = list(equal)
        unit = same[0]
        rows.append(
            (
                _names([each.name for each in same]),
                unit.module if len(same) == 1 else f"{len(same)} x {unit.module}",
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
