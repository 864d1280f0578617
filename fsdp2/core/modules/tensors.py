"""Where a forward leaves tensors: inside of arguments and results of any shape, and on its modules.

Arguments and results are tuples, lists, dicts, dataclasses, and types that pytree knows. Strings, numbers, None and
unknown objects are left as they are.

A module may keep a tensor as an attribute instead of returning it: a router's auxiliary loss, kept activations.
Backward may begin at such a tensor, and then needs the parameters as it does at an output. fsdp2 looks for these
attributes after a unit's first forward with autograd, in evaluation and in training, and reads them after every later
one: a part that is frozen in the first may be trained in the second.

Worked example: ``block.router`` sets ``self.aux_loss``; the places of ``block`` are [(vars(block.router), "aux_loss")]
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...torch_names.torch_modules import applied_apis
from ...torch_names.torch_tensors import pytree


def find_tensors(tree: Any, found: list[Tensor]) -> None:
    """Append every tensor in ``tree`` to ``found``, depth first."""
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            find_tensors(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            find_tensors(item, found)
    elif tree is None or isinstance(tree, (str, int, float)):
        pass
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            find_tensors(getattr(tree, field.name, None), found)
    elif type(tree) in pytree.SUPPORTED_NODES:
        found += [item for item in pytree.tree_leaves(tree) if isinstance(item, Tensor)]


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with every tensor changed; a container is copied if something in it changed, else returned as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return _map_dict(change, tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(change, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
            return type(tree)(*items)
        return type(tree)(items)
    if tree is None or isinstance(tree, (str, int, float)):
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(change, tree)
    if type(tree) in pytree.SUPPORTED_NODES:
        return pytree.tree_map_only(Tensor, change, tree)
    return tree


def _map_dict(change: Callable[[Tensor], Tensor], tree: dict[Any, Any]) -> Any:
    items = {key: map_tensors(change, value) for key, value in tree.items()}
    if all(items[key] is tree[key] for key in items):
        return tree
    if type(tree) is dict:
        return items
    if type(tree) in pytree.SUPPORTED_NODES:
        return pytree.tree_map_only(Tensor, change, tree)
    copy = tree.copy()  # a subclass: keep its attributes next to its items
    for key, value in items.items():
        copy[key] = value
    return copy


def _map_dataclass(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(tree):
        old = getattr(tree, field.name, None)
        new = map_tensors(change, old)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return tree
    copy = object.__new__(type(tree))  # not __init__, which may check or compute
    copy.__dict__.update(getattr(tree, "__dict__", {}))
    for field in dataclasses.fields(tree):
        if field.name in changed or not hasattr(copy, field.name):
            object.__setattr__(copy, field.name, changed.get(field.name, getattr(tree, field.name, None)))
    return copy


# --- on modules -------------------------------------------------------------------------------------------------------

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
        """Add places; those that are known already stay single."""
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
    """The tensors stored on ``module`` and below it, except below modules that are sharded themselves; None: none.

    known: what was found in evaluation, for training, or the reverse; it gets the new places too, and is the result
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
            if "fully_shard" not in applied_apis(child):
                _visit(child, found)
