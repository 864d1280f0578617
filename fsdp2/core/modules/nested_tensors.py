"""Tensors inside arguments and results of any shape: tuples, lists, dicts, dataclasses, and types that pytree knows.

Strings, numbers, None and unknown objects are left as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..torch_compat import pytree


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
    """``tree`` with every tensor changed; containers are copied if something in them changed, else returned as they are."""
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
    copy = tree.copy()  # a subclass: keep its attributes beside its items
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
