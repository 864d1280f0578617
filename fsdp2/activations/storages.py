"""Storages that autograd keeps: which of them were seen before, and which belong to parameters, that are there anyway."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ..torch_names import torch_tensors

_Value = TypeVar("_Value")


class StorageMap(Generic[_Value]):
    """A value for each storage, as long as that lives: another may come to lie where a dead one was."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Value]] = {}

    def get(self, tensor: Tensor) -> _Value | None:
        found = self._found.get(torch_tensors.storage_key(tensor))
        return None if found is None or found[0]() is None else found[1]

    def put(self, tensor: Tensor, value: _Value) -> None:
        self._found[torch_tensors.storage_key(tensor)] = (weakref.ref(tensor.untyped_storage()), value)

    def prune(self) -> None:
        """Forget the dead."""
        self._found = {key: found for key, found in self._found.items() if found[0]() is not None}


def parameter_storages(module: nn.Module) -> set[int]:
    """Keys of the storages of what ``module`` and those below it show now as parameters and buffers."""
    return {
        torch_tensors.storage_key(tensor)
        for each in module.modules()
        for tensors in (each._parameters, each._buffers)
        for tensor in tensors.values()
        if tensor is not None and has_storage(tensor)
    }


def has_storage(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor: a tensor subclass may keep its values anywhere."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_sparse and not tensor.is_meta
