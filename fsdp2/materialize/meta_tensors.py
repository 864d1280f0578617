"""Parameters and buffers of a model on the meta device, sharded or not, and their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.group.param import ShardedParam
from ..core.iteration.module_state import units_in
from ..core.iteration.unit import Unit


@dataclass(frozen=True)
class Place:
    """Where a plain tensor is registered: ``registry[name]``, ``module._parameters`` or ``module._buffers``."""

    registry: dict[str, Any]
    name: str


@dataclass
class PlainTensor:
    """A parameter or buffer that fully_shard does not manage, on the meta device."""

    fqn: str
    places: list[Place]
    tensor: Tensor
    meta: Tensor | None = None  # its meta twin, once it has storage
    written: bool = False


@dataclass
class MetaTensors:
    """The tensors of a model that are on the meta device, by ``id``, and its units."""

    units: Sequence[Unit]
    managed: dict[int, ShardedParam]  # all managed parameters, also those with values
    sharded: dict[int, str]  # those on the meta device, and their names
    plain: dict[int, PlainTensor]
    replaced: dict[int, Any] = field(default_factory=dict)  # ``id`` of a new object -> the object whose place it took

    def key(self, tensor: Any) -> int:
        return id(self.replaced.get(id(tensor), tensor))

    def is_missing(self, tensor: Tensor) -> bool:
        return self.key(tensor) in self.sharded or self.key(tensor) in self.plain

    def exchange(self, old: Any, new: Any, places: Iterable[Place]) -> tuple[Any, Any]:
        """Put ``new`` where ``old`` is; returns the object with the values of ``new`` and the object with those of ``old``.

        The object stays the same, for the optimizer and the closures that hold it, unless there is a weak reference to it.
        """
        try:
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        except RuntimeError:
            for place in places:
                place.registry[place.name] = new
            self.replaced[id(new)] = self.replaced.get(id(old), old)
            return new, old
        return old, new

    def has_only_values(self, module: nn.Module) -> bool:
        own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        return bool(own) and not any(self.is_missing(tensor) for tensor in own)


def find_meta_tensors(model: nn.Module) -> MetaTensors:
    units = units_in(model.modules())
    managed = {id(p.sharded): p for unit in units for group in unit.groups for p in group.params}
    sharded: dict[int, str] = {}
    plain: dict[int, PlainTensor] = {}
    for prefix, module in model.named_modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                fqn = f"{prefix}.{name}" if prefix else name
                if tensor is None:
                    continue
                if id(tensor) in managed:
                    if managed[id(tensor)].local_now().is_meta:
                        sharded.setdefault(id(tensor), fqn)
                elif tensor.is_meta:
                    plain.setdefault(id(tensor), PlainTensor(fqn, [], tensor)).places.append(Place(registry, name))
    return MetaTensors(units, managed, sharded, plain)
