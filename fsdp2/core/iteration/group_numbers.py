"""Numbers by which all ranks know a group: its place among the groups over the same ranks, in the order of ``fully_shard`` calls.

A rank may have other groups over other ranks; they do not count.
"""

from __future__ import annotations

import collections
import weakref

from ..group.memory import GroupMemory
from ..group.param_group import ParamGroup
from ..plan.mesh import DataParallelMesh
from .unit import Unit

_num_groups: collections.Counter[tuple[str, ...]] = collections.Counter()
_num_units: collections.Counter[tuple[str, ...]] = collections.Counter()
_numbered: weakref.WeakSet[ParamGroup] = weakref.WeakSet()


def number_groups(unit: Unit) -> None:
    """Number the groups of ``unit``, which ``fully_shard`` has just made."""
    if unit.groups:
        _num_units[_ranks_of(unit.groups[0].mesh)] += 1
    for group in unit.groups:
        ranks = _ranks_of(group.mesh)
        group.gradients.number = _num_groups[ranks]
        _num_groups[ranks] += 1
        _numbered.add(group)


def num_units_over(mesh: DataParallelMesh | None) -> int:
    """How many units ``fully_shard`` has made whose first group communicates over the same ranks."""
    return 0 if mesh is None else _num_units[_ranks_of(mesh)]


def names_of(number: int, modulo: int, like: GroupMemory) -> list[str]:
    """Names of the units whose groups over the same ranks as ``like`` have a number that equals ``number`` modulo ``modulo``."""
    found = [
        group for group in _numbered if group.gradients.number % modulo == number and _ranks_of(group.mesh) == _ranks_of(like.mesh)
    ]
    return sorted({name_of(group) for group in found})


def name_of(group: GroupMemory) -> str:
    """The name of the group's unit."""
    return group.fqn or "the root"


def _ranks_of(mesh: DataParallelMesh) -> tuple[str, ...]:
    return tuple(group.group_name for group in (mesh.shard_group, mesh.replicate_group) if group is not None)
