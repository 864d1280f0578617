"""Tensors that a forward leaves on its modules instead of returning them: a router's auxiliary loss, kept activations.

Backward may begin at such a tensor, and then needs the parameters just as when it begins at an output. fsdp2 looks for the attributes
that keep tensors after a unit's first forward with autograd, in evaluation and in training, and looks them up after every later one:
a part that is frozen in the first may be trained in the second.

Worked example: forward of ``block.router`` sets ``self.aux_loss``; the places of ``block`` are [(vars(block.router), "aux_loss")]
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .. import torch_compat as compat

_OWN_NAMES = frozenset(vars(nn.Module()))
"""Where ``nn.Module`` keeps parameters, hooks and the like."""


class StoredTensors:
    """Attributes of modules that may hold a tensor with a graph after any forward.

    places: the modules' attributes, and names among them
    """

    def __init__(self, places: Sequence[tuple[dict[str, Any], str]]) -> None:
        self._places = list(places)
        self._seen: list[weakref.ref[Tensor] | None] = [None] * len(places)

    def add(self, places: Sequence[tuple[dict[str, Any], str]]) -> None:
        """Add places, some of which may be known."""
        known = {(id(attributes), name) for attributes, name in self._places}
        new = [(attributes, name) for attributes, name in places if (id(attributes), name) not in known]
        self._places += new
        self._seen += [None] * len(new)

    def new(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """The tensors that were not there at the last call."""
        for index, (attributes, name) in enumerate(self._places):
            value = attributes.get(name)
            seen = self._seen[index]
            if isinstance(value, Tensor) and value.grad_fn is not None and (seen is None or seen() is not value):
                yield attributes, name, value
                self._seen[index] = weakref.ref(attributes[name])


def stored_tensors(module: nn.Module, known: StoredTensors | None) -> StoredTensors | None:
    """The tensors stored on ``module`` and below it, but not below modules that are sharded by themselves, and those of ``known``.

    Returns: None if there are none
    """
    found: dict[int, nn.Module] = {}
    _visit(module, found)
    places = [
        (vars(each), name)
        for each in found.values()
        for name, value in vars(each).items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and name not in _OWN_NAMES
    ]
    if known is not None:
        known.add(places)
    return known or (StoredTensors(places) if places else None)


def _visit(module: nn.Module, found: dict[int, nn.Module]) -> None:
    if id(module) not in found:
        found[id(module)] = module
        for child in module.children():
            if "fully_shard" not in compat.applied_apis(child):
                _visit(child, found)
