"""The operators of a step, as a graph of the device would keep them: what makes the host wait, and what differs from the step before.

with Watch() as before: step(x)
with Watch() as now: step(x)
now.problem                 # "aten._local_scalar_dense.default makes the host wait for the device (train.py:12)", or None
now.changed_since(before)   # "sizes change: ...", or None
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .torch_names import torch_tensors
from .torch_names.torch_tensors import pytree
from .user_warnings import line_of_the_user


class _Operator(NamedTuple):
    """What a graph keeps of an operator: its tensors, other arguments, and the storages that the step did not make itself."""

    name: str
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    values: tuple[str, ...]
    outside: tuple[int, ...]


_CHOSEN_BY_COUNTS = {"aten::detach", "aten::new_empty_strided", "aten::copy_", "aten::clone"}
"""Autograd copies a gradient, or takes it, by how many refer to it just then; both are the same to a graph."""


class Watch(torch_tensors.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator of a step. problem: the first one that makes the host wait; lines: where the user's program called each"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[_Operator] = []
        self.lines: list[str] = []
        self.problem: str | None = None
        self.outside: dict[int, torch.UntypedStorage] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_tensors.FakeTensor in types:  # sizes are worked out, and nothing runs
            return func(*args, **kwargs)
        if any(map(torch_tensors.has_own_dispatch, types)):
            return NotImplemented  # a DTensor, say: it comes back with its local tensors
        frame = line_of_the_user()
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if self.problem is None and _waits(func, args, kwargs):
            self.problem = f"{func} makes the host wait for the device ({line})"
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        numbers = [each.item() if _is_number(each) else each for each in leaves if _is_number(each) or not isinstance(each, Tensor)]
        outside = tuple(filter(None, map(self._storage, tensors)))
        if outside or func.name().partition(".")[0] not in _CHOSEN_BY_COUNTS:
            shapes = tuple((tuple(each.shape), each.dtype) for each in tensors)
            values = tuple(str(each) for each in numbers if isinstance(each, (bool, int, float, complex, str, torch.dtype)))
            self.operators.append(_Operator(str(func), shapes, values, outside))
            self.lines.append(line)
        result = func(*args, **kwargs)
        self._made |= {
            torch_tensors.storage_key(each)
            for each in pytree.tree_leaves(result)
            if isinstance(each, Tensor) and torch_tensors.storage_key(each) not in self.outside
        }
        return result

    def _storage(self, tensor: Tensor) -> int | None:
        """Of a tensor from before the step: by the object, because what is freed in each step may move."""
        key = torch_tensors.storage_key(tensor)
        if key in self._made or (tensor.is_cpu and not tensor.is_pinned()):
            return None
        self.outside[key] = tensor.untyped_storage()
        return key

    def changed_since(self, before: Watch) -> str | None:
        """What this step does in another way than the one before it."""
        for index, (old, new) in enumerate(zip_longest(before.operators, self.operators)):
            if old == new:
                continue
            lines = self.lines if new else before.lines
            where = f"({lines[index]})"
            if old is None or new is None or old.name != new.name:
                return f"it ran {new and new.name} where it had run {old and old.name} one step before {where}"
            if old.tensors != new.tensors:
                return f"sizes change: {new.name} got tensors of {_sizes(new)}, and of {_sizes(old)} one step before {where}"
            if old.values != new.values:
                changes = dict.fromkeys(f"{b}, {a} one step before" for a, b in zip_longest(old.values, new.values) if a != b)
                changed = ", ".join(changes)
                return f"a Python number changes, which a graph would keep: {new.name} got {changed} {where}"
            return f"an address changes: {new.name} read another tensor one step before {where}; pass it as an argument"
        return None


def _sizes(operator: _Operator) -> list[tuple[int, ...]]:
    return [shape for shape, _ in operator.tensors]


def _is_number(value: object) -> bool:
    """Whether a kernel gets the tensor's value instead of its address."""
    return isinstance(value, Tensor) and value.is_cpu and value.dim() == 0


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if all(each.is_cpu for each in tensors):
        return False
    name = func.name().partition(".")[0]
    if name == "aten::index":
        return any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:])
    if name in ("aten::copy_", "aten::_to_copy"):
        target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or args[0].device)
        source = args[1] if name == "aten::copy_" else args[0]
        is_async = kwargs.get("non_blocking") or args[2:3] == (True,)
        host = source if source.is_cpu else args[0] if name == "aten::copy_" else None
        crosses = target.type != source.device.type and not (_is_number(source) and name == "aten::copy_")
        return crosses and not (is_async and host is not None and host.is_pinned())
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
