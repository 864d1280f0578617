"""Parameters that several modules share, and ties that users make between ``fully_shard`` and the first forward.

``fully_shard`` finds a tie by the original parameter. A loader may tie later: it shards a model on the meta device,
reads the files, and only then assigns the sharded embedding to the head. Nothing has been gathered by then, so the
head's parameter leaves its group, and the head's unit borrows the embedding's group, as if the tie had been there from
the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import ParameterError
from ..group.options import GroupOptions
from ..group.param import ShardedParam
from ..group.param_group import ParamGroup
from ..plan.mesh import DataParallelMesh
from .module_state import ModuleState


def tie_differences(
    group: ParamGroup, param: ShardedParam, mesh: DataParallelMesh, options: GroupOptions, dim: int | None
) -> list[str]:
    """Why ``param`` of ``group`` can't also belong to a module that is sharded over ``mesh`` with ``options``.

    dim: the dim on which the other module's parameter is cut; None for a parameter that is not cut
    """
    theirs = group.options
    dtypes = (options.param_dtype, options.reduce_dtype)
    differ = {
        "another mesh": group.mesh.groups != mesh.groups,
        "another param_dtype or reduce_dtype": (theirs.param_dtype, theirs.reduce_dtype) != dtypes,
        "another offload policy": (theirs.offload, theirs.folder) != (options.offload, options.folder),
        "another placement": param.spec.dim not in (None, dim),
    }
    return [what for what, differs in differ.items() if differs]


def adopt_late_ties(units: Sequence[ModuleState]) -> None:
    """Tie the parameters that ``units`` hold in separate places and that the user has made one. Collective: no.

    A group that has been unsharded before keeps its parameters: the tie is refused by name at its next unshard.

    Raises: ParameterError on all ranks if the two modules are sharded differently
    """
    first: dict[int, tuple[ModuleState, ParamGroup, ShardedParam]] = {}
    late: list[tuple[ModuleState, ParamGroup, ShardedParam, nn.Parameter]] = []
    for unit in units:
        for group in unit.groups:
            for param in group.params:
                now = _now(param)
                if now is None or now.shape != param.sharded.shape:
                    continue
                if now is param.sharded or id(now) not in first:
                    moved = first.get(id(now))
                    first[id(now)] = (unit, group, param)
                    if moved is not None:
                        late.append((*moved, now))
                else:
                    late.append((unit, group, param, now))
    for unit, group, param, now in late:
        if group.unsharded is None:
            _tie(unit, group, param, *first[id(now)][1:])


def _now(param: ShardedParam) -> nn.Parameter | None:
    """The sharded parameter that all owners of ``param`` show; None if they show several, or anything else."""
    shown: list[Any] = [owner.module._parameters.get(owner.name) for owner in param.owners]
    now = shown[0]
    return (
        now
        if isinstance(now, nn.Parameter) and isinstance(now, DTensor) and all(each is now for each in shown)
        else None
    )


def _tie(unit: ModuleState, group: ParamGroup, param: ShardedParam, to_group: ParamGroup, to: ShardedParam) -> None:
    """Take ``param`` out of ``group`` and let its owners share ``to``, whose group ``unit`` borrows."""
    differences = tie_differences(to_group, to, group.mesh, group.options, param.spec.dim)
    if differences:
        raise ParameterError(
            f"{param.fqn} {tuple(param.sharded.shape)} was tied after fully_shard to {to.fqn}, which has "
            + " and ".join(differences),
            expected="the same mesh, dtypes, offload policy and placement for all modules that share a parameter",
            fix="let the fully_shard calls on both modules agree, or tie the parameters before fully_shard",
        )
    group.registry.remove(param)
    group.params.remove(param)
    to_group.registry.verify(to_group.plan.has_own_memory)  # adopts what a loader has put into both places
    for owner in param.owners:
        to_group.registry.add_owner(to, owner)
    if group.params:
        group.registry.verify(group.plan.has_own_memory)
        group.rebuild()
    else:
        unit.groups.remove(group)
        unit.uses.remove(group)
    if to_group in unit.uses:
        unit.extend((), ())
    else:
        unit.extend((), [to_group])
        unit.hooks.watch_state_dicts(to_group)
