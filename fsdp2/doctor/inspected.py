"""A sharded model as the checks look at it: its units, its parameters, its buffers, its optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, ModuleError, got, got_object
from ..inspect import Group, Parameter, Unit, units


@dataclass(frozen=True)
class Inspected:
    """units: the root first"""

    model: nn.Module
    units: list[Unit]
    optimizers: tuple[Optimizer, ...]

    @property
    def groups(self) -> list[Group]:
        return [group for unit in self.units for group in unit.groups]

    @property
    def params(self) -> list[Parameter]:
        return [param for group in self.groups for param in group.params]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The tensors that state dicts have, and those that they lack."""
        return dict(self.model.named_buffers())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that train on different data, this one among them: those of the root's mesh."""
        return tuple(sorted(next((group.ranks for group in self.groups), frozenset())))


def inspect(model: Any, optimizer: Optimizer | Iterable[Optimizer] | None, caller: str) -> Inspected:
    """Raises: ModuleError if ``model`` is not sharded; ArgumentError for something else than optimizers."""
    if not isinstance(model, nn.Module):
        raise ModuleError(got_object(caller, model), expected="a model that fully_shard was called on", fix="pass the model itself")
    found = units(model)
    if not found:
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
    return Inspected(model, found, optimizers)
