"""A sharded model as the checks look at it: its units by name, its parameters as optimizers hold them, its buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.group.param import ShardedParam
from ..core.group.param_group import ParamGroup
from ..core.iteration.module_state import ModuleState, units_below
from ..errors import ArgumentError, ModuleError, got, got_object


@dataclass(frozen=True)
class Inspected:
    """units: with the name of their first module, the root first; params: those of all groups, by the names that they have now"""

    model: nn.Module
    units: list[tuple[str, ModuleState]]
    optimizers: tuple[Optimizer, ...]

    @property
    def groups(self) -> list[tuple[str, ParamGroup]]:
        return [(name, group) for name, unit in self.units for group in unit.groups]

    @property
    def params(self) -> list[tuple[ShardedParam, ParamGroup]]:
        return [(param, group) for _, group in self.groups for param in group.params]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The tensors that state dicts have, and those that they lack."""
        return dict(self.model.named_buffers())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that train on different data, this one among them: those of the root's mesh."""
        return tuple(sorted(next((group.mesh.ranks for _, group in self.groups), frozenset())))


def inspect(model: Any, optimizer: Optimizer | Iterable[Optimizer] | None, caller: str) -> Inspected:
    """Raises: ModuleError if ``model`` is not sharded; ArgumentError for something else than optimizers."""
    if not isinstance(model, nn.Module):
        raise ModuleError(got_object(caller, model), expected="a model that fully_shard was called on", fix="pass the model itself")
    units = units_below(model)
    if not units:
        raise ModuleError(
            f"{caller} got a {type(model).__name__} that is not sharded",
            expected="a model that parallelize or fully_shard was called on",
            fix="call it after fully_shard",
        )
    given: Any = () if optimizer is None else optimizer
    optimizers = tuple(given) if isinstance(given, Iterable) else (given,)
    wrong = [each for each in optimizers if not isinstance(each, Optimizer)]
    if wrong:
        raise ArgumentError(
            got(caller, "optimizer", wrong[0]), expected="a torch.optim.Optimizer, or several", fix="pass the optimizer itself"
        )
    return Inspected(model, units, optimizers)
