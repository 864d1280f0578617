"""Numbers by which all ranks know a group: its place among the groups over the same ranks, in the order of their first reductions.

Ranks may make different models, and run them in different orders as long as nothing is reduced. All of them take part in the first
backward that reduces gradients of a root, which numbers the root's groups. A rank may have groups over other ranks; they do not count.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable

from ..group.memory import GroupMemory
from ..group.param_group import ParamGroup
from ..plan.mesh import DataParallelMesh
from .unit import Unit

_num_groups: collections.Counter[tuple[str, ...]] = collections.Counter()
_numbered: weakref.WeakSet[ParamGroup] = weakref.WeakSet()


def number_groups(units: Iterable[Unit]) -> None:
    """Number the groups of ``units``, the units of a root, except those that another root has numbered before."""
    for unit in units:
        for group in unit.groups:
            if group not in _numbered:
                ranks = _ranks_of(group.mesh)
                group.gradients.set_number(_num_groups[ranks])
                _num_groups[ranks] += 1
                _numbered.add(group)


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
