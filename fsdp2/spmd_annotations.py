"""Parameters annotated with the package ``spmd_types``: plain tensors that say how ranks differ in them, axis by axis.

A user annotates the tensor that this rank computes with. fsdp2 keeps it as a DTensor on the full SPMD mesh, and forward
sees a plain tensor with its annotations again. This file does not import the package, because a program that annotates
a parameter has imported it, and uses only its public names.

Worked example: a (2, 4) weight on the mesh ("dp", "tp") of 2 x 2 ranks, {tp: S(0)}, dp_mesh_dims shard="dp":

    stored       a (4, 4) DTensor, Replicate on dp (which FSDP cuts then), Shard(0) on tp
    forward      the (2, 4) tensor, annotated {dp: R, tp: V} and the partition (tp, None)
    gradient     a plain (2, 4) tensor, which counts as Partial on dp and Shard(0) on tp

    the type on another axis      the parameter is stored      its gradient counts as
    I (invariant)                 Replicate                    Replicate: equal on all ranks already
    R (replicated)                Replicate                    Partial: each rank's term, added up before FSDP reduces
    S(d)                          Shard(d)                     Shard(d)
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Annotations:
    """How one annotated parameter is placed on the full SPMD mesh, and what forward sees.

    placements:  of the parameter, one for each axis of the full mesh, before FSDP cuts it over the data-parallel axes
    gradient:    of the plain gradient that backward makes
    types:       what the plain parameter of forward is annotated with, by axis
    partition:   which axes cut which of its dims; None if no axis does
    """

    placements: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    types: tuple[tuple[Any, Any], ...]
    partition: Any

    def put_on(self, tensor: Tensor) -> None:
        if self.types:
            _package().assert_type(tensor, dict(self.types), partition_spec=self.partition)


def _package() -> Any:
    return sys.modules["spmd_types"]


def has_types(tensor: Tensor) -> bool:
    """Whether ``tensor`` was annotated on an axis of more than one rank."""
    return "spmd_types" in sys.modules and bool(_package().get_local_type(tensor))


def was_annotated(tensor: Tensor) -> bool:
    """Whether ``tensor`` was annotated at all: the package drops axes of one rank."""
    return "spmd_types" in sys.modules and bool(_package().has_local_type(tensor))


def is_annotation(value: Any, of: Tensor) -> bool:
    """Whether ``value``, an attribute of ``of``, holds the package's annotations."""
    if value is None or "spmd_types" not in sys.modules:
        return False
    return value is _package().get_local_type(of) or value is _package().get_partition_spec(of)


def exempt_from_typechecking(functions: Iterable[Callable[..., Any]]) -> None:
    """Let ``spmd_types.typecheck()`` skip these functions: they handle tensors that have no annotations.

    Versions before 0.3 cannot, so this call does nothing there; only programs without annotations have them loaded.
    """
    register = getattr(_package(), "register_no_typecheck", None) if "spmd_types" in sys.modules else None
    if register is not None:
        for function in functions:
            register(function)


def read_annotations(param: nn.Parameter, mesh: DeviceMesh, data_axes: tuple[int, ...]) -> Annotations | str:
    """The annotations of ``param`` on the full ``mesh``; if unreadable, the reason as a string. Collective: no.

    An axis without an annotation is data-parallel, or has one rank. Types in forward may be on other axes than those of
    the full mesh, if they span the same ranks: the annotation's axes, else those of ``spmd_types.set_current_mesh``.
    """
    spmd = _package()
    names = mesh.mesh_dim_names
    assert names is not None
    stored = [spmd.MeshAxis.of(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    types = dict(spmd.get_local_type(param))
    partition = spmd.get_partition_spec(param)
    cut_dims = _cut_dims(partition)
    shown = spmd.current_mesh() if _span(tuple(types)) != _span(tuple(stored)) else tuple(types)
    if shown is None:
        missing = [name for name, axis in zip(names, stored, strict=True) if axis.size() > 1 and axis not in types]
        return f"has no spmd_types annotations on {missing}, and no spmd_types.set_current_mesh says on which axes forward has types"
    if not set(types) <= set(shown) or _span(tuple(shown)) != _span(tuple(stored)):
        return f"has spmd_types annotations on {_listed(types)}, on a mesh of {_listed(shown)}, which does not go with {mesh}"
    data = _span(tuple(stored[axis] for axis in data_axes))
    for axis, type_ in types.items():
        if set(_ranks(axis)) <= data:
            if type_ is not spmd.R:
                shown_type = f"S({cut_dims[axis]})" if axis in cut_dims else repr(type_)
                return f"has the spmd_types annotation {shown_type} on the data-parallel axis {axis!r}; expected R, or none"
        elif axis not in [stored[each] for each in range(len(stored)) if each not in data_axes]:
            return f"has an spmd_types annotation on {axis!r}, which is no axis of {mesh}"
    if _disordered(partition, stored):
        return f"is cut over several axes in another order, {partition}, than they have in {mesh}"
    placed: list[tuple[Placement, Placement]] = []  # the parameter, and its gradient
    for index, (name, axis) in enumerate(zip(names, stored, strict=True)):
        type_ = types.get(axis)
        if index in data_axes or (axis.size() > 1 and type_ is spmd.R):
            placed.append((Replicate(), Partial()))
        elif axis.size() == 1 or type_ is spmd.I:
            placed.append((Replicate(), Replicate()))
        elif axis in cut_dims:
            placed.append((Shard(cut_dims[axis]), Shard(cut_dims[axis])))
        elif type_ is None:
            return f"has no spmd_types annotation on {name!r}, which is not data-parallel"
        else:
            return f"has the spmd_types annotation {type_!r} on {name!r}; expected I, R, or S(dim)"
    in_forward = tuple((axis, types.get(axis, spmd.R)) for axis in shown)
    placements, gradient = zip(*placed, strict=True)
    return Annotations(placements, gradient, in_forward, partition)


def _axes_of(entry: Any) -> tuple[Any, ...]:
    """The axes of one dim in a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _cut_dims(partition: Any) -> dict[Any, int]:
    return {axis: dim for dim, entry in enumerate(partition or ()) for axis in _axes_of(entry)}


def _disordered(partition: Any, stored: list[Any]) -> bool:
    """Whether a later axis cuts a dim first: DTensor cuts in the order of the mesh."""
    orders = [[stored.index(axis) for axis in _axes_of(entry)] for entry in partition or ()]
    return any(order != sorted(order) for order in orders)


def _listed(axes: Iterable[Any]) -> list[str]:
    return sorted(map(repr, axes))


@functools.cache
def _ranks(axis: Any) -> tuple[int, ...]:
    """The ranks of the slice along ``axis`` that begins at rank 0."""
    return tuple(axis.layout.all_ranks_from_zero())


@functools.cache
def _span(axes: tuple[Any, ...]) -> frozenset[int]:
    """The ranks of the slice along all of ``axes`` together that begins at rank 0."""
    return frozenset(map(sum, itertools.product(*map(_ranks, axes))))
