"""Values of small integer tensors that follow from sizes alone: positions, masks, counts.

A plan's tensors have no values. But a program may look at integers that it has made from sizes, for instance whether positions are
0, 1, 2, ..., and take a shorter path. So the values of what ``arange``, ``zeros`` and their like make, and of what is computed from
that, are kept here.

Worked example: ``(torch.arange(8).diff() != 1).any()`` is known to be False. ``router(x).argmax()`` is not: ``x`` has no values.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from . import torch_names

_MOST_ELEMENTS = 1 << 20
_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


class _UnknownError(Exception):
    """An argument has no values; no error of the user's."""


class KnownValues:
    """By tensor without memory, a tensor with its values."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note(self, result: Tensor, value: Any) -> None:
        key = id(result)
        if isinstance(value, Tensor) and value.shape == result.shape:
            self._of[key] = weakref.ref(result, lambda _: self._of.pop(key, None)), value

    def note_written(self, tensor: Tensor) -> None:
        """The values of ``tensor`` and of its views are not known any more."""
        storage = tensor.untyped_storage()
        others = [(key, other) for key, (reference, _) in self._of.items() if (other := reference()) is not None]
        for key, other in others:
            if other.untyped_storage() is storage:
                del self._of[key]

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], results: list[Tensor]) -> None:
        """Keep the value of ``func``'s result, if that is one small integer tensor, and update what ``func`` has written."""
        if len(results) != 1 or results[0].dtype not in _DTYPES:
            return
        if torch_names.writes(func):
            self.note_written(results[0])
        elif results[0].numel() <= _MOST_ELEMENTS:
            self.note(results[0], self.computed(func, args, kwargs))

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``func`` returns for the values of its arguments; None where they are not known, or do not decide."""
        if torch_names.is_undetermined(func):
            return None
        try:
            given = {name: "cpu" if name == "device" and value is not None else self._value(value) for name, value in kwargs.items()}
            return func(*map(self._value, args), **given)
        except _UnknownError:
            return None
        except Exception:  # no kernel for values on the CPU, for one: what fake tensors say of the operator stands
            return None

    def _value(self, given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [self._value(each) for each in given]
        if not isinstance(given, Tensor):
            return given
        if id(given) in self._of:
            return self._of[id(given)][1]
        if given.is_meta or isinstance(given, torch_names.FakeTensor):
            raise _UnknownError
        return given
