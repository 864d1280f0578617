"""Unpickles files of ``torch.save`` without running code from them.

A pickle names classes and functions, and calls them. Here containers and dtypes are the real ones, ``tensor_of`` makes
tensors from their descriptions, and every other name becomes a class without behavior (``Inert``) that records its
arguments. So files with classes of DeepSpeed, FSDP1 or the user can be read where these are not installed, and none of
their code runs. The cost of reading is bounded by the length of the file, see ``pickle_limits.py``.

Worked example: ``ds.ZeroStageEnum(2)`` comes out as an Inert with ``path == "ds.ZeroStageEnum"`` and ``args == (2,)``.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .pickle_limits import BoundedUnpickler, check_made, checked_dict, checked_frozenset, checked_ordered_dict, checked_set

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_MAX_CLASSES = 10_000
"""How many classes a file may name: naming one takes five bytes, making it two thousand."""


class Inert:
    """Stands for an object, or the result of a call, that was not made; ``path`` names the class or function."""

    path = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        self = super().__new__(cls)
        self.args = args
        self.state = None
        self.items = []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts the arguments of the real class."""

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"{self.path}(...)"

    @property
    def fields(self) -> dict[str, Any]:
        """Its attributes, from ``__dict__`` and ``__slots__``."""
        found: dict[str, Any] = {}
        for each in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(each, dict):
                found |= each
        return found


@dataclass(frozen=True)
class SavedTensor:
    """A tensor's description: elements of ``dtype`` from ``offset`` (elements) on in the storage named ``key``.

    bits: "neg" and "conj", where the elements in the storage are the negated or conjugated ones
    """

    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bits: frozenset[str] = frozenset()


class _Storage:
    def __init__(self, key: str, dtype: torch.dtype) -> None:
        self.key = key
        self.dtype = dtype


class _DefaultDict(dict[Any, Any]):
    """A defaultdict without its factory."""

    def __init__(self, *args: Any) -> None:
        super().__init__()


_BUILTINS: dict[str, Any] = {
    "set": checked_set,
    "frozenset": checked_frozenset,
    "complex": complex,
    "list": list,
    "dict": checked_dict,
    "tuple": tuple,
    "slice": slice,
}


class _Unpickler(BoundedUnpickler):
    def __init__(self, data: bytes, tensor_of: Callable[[SavedTensor], Any]) -> None:
        super().__init__(data)
        self._tensor_of = tensor_of
        self._classes: dict[str, type[Inert]] = {}
        self._functions: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "_codecs.encode": _encode,
            "builtins.getattr": _attribute,
            "__builtin__.getattr": _attribute,
        }

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if module in ("builtins", "__builtin__") and name in _BUILTINS:
            return _BUILTINS[name]
        if path == "collections.OrderedDict":
            return checked_ordered_dict
        if path == "collections.defaultdict":
            return _DefaultDict
        if path in ("torch.Size", "torch._C.Size"):
            return tuple
        if module in ("torch", "torch.storage", "torch.cuda") and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if path in self._functions:
            return self._functions[path]
        if path not in self._classes:
            if len(self._classes) >= _MAX_CLASSES:
                raise pickle.UnpicklingError(f"it names more than {_MAX_CLASSES} classes")
            self._classes[path] = type(name, (Inert,), {"path": path})
        return self._classes[path]

    def build(self, made: Any, state: Any) -> bool:
        if isinstance(made, Inert):
            made.state = state
        return isinstance(made, (Inert, OrderedDict))  # nobody needs a state dict's attributes

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", torch.dtype() as dtype, str(key), _, int()):
                return _Storage(key, dtype)
            case ("storage", _, str(key), _, int()):
                return _Storage(key, torch.uint8)
        return super().persistent_load(pid)

    def _tensor(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any = None, hooks: Any = None, bits: Any = None
    ) -> Any:
        return self._tensor_v3(storage, offset, shape, stride, grad, hooks, storage.dtype, bits)

    def _tensor_v3(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: torch.dtype, bits: Any = None
    ) -> Any:
        known = frozenset(name for name, is_set in (bits or {}).items() if is_set)
        if not known <= {"neg", "conj"}:
            raise pickle.UnpicklingError(f"it describes a tensor with the marks {sorted(known)}"[:200])
        return self._tensor_of(SavedTensor(storage.key, dtype, offset, tuple(shape), tuple(stride), known))

    def _from_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """A tensor of a Python class: the tensor itself if we know the class; a subclass around others stays inert, with its state."""
        value = function(*args)
        if isinstance(value, Inert) and isinstance(kind, type) and issubclass(kind, Inert):
            made = kind(*args)
            made.state = state
            return made
        return value


def _attribute(owner: Any, name: str) -> Any:
    """How pickles name a nested class."""
    if isinstance(owner, type) and issubclass(owner, Inert):
        return type(name, (Inert,), {"path": f"{owner.path}.{name}"})
    raise pickle.UnpicklingError(f"it asks {type(owner).__name__} for {name}")


def _first(value: Any, *rest: Any) -> Any:
    return value


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding != "utf-8" else encoding)


def unpickle(data: bytes, tensor_of: Callable[[SavedTensor], Any]) -> Any:
    """The object that ``data`` describes. Raises: any error that a broken pickle may raise"""
    made = _Unpickler(data, tensor_of).load()
    check_made(made, 4 * len(data) + 1000)  # without sharing, each object takes a byte or more
    return made
