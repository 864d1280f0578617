"""Unpickles without running code, at a cost that the length of the pickle bounds.

A pickle names classes and functions, and calls them. ``unpickle`` reads files of ``torch.save``: containers and dtypes are
the real ones, ``tensor_of`` makes tensors from their descriptions, and every other name becomes a class without behavior
(``Inert``) that records its arguments. So files with classes of DeepSpeed, FSDP1 or the user can be read where these are
not installed, and none of their code runs.

Worked example: ``ds.ZeroStageEnum(2)`` comes out as an Inert with ``path == "ds.ZeroStageEnum"`` and ``args == (2,)``.

A few bytes can cost gigabytes or hours. C's unpickler keeps its memo in an array: nine bytes that store something at index 2**27 make
it write 2 GiB. To hash a dict's key that is a tuple of shared tuples, forty levels deep, takes 2**40 steps. And ``list(x)`` of one long
list, called again and again, copies it each time. So ``BoundedUnpickler`` is the standard library's unpickler in Python, whose memo is
a dict, with checks of keys and of the arguments of calls. ``check_made`` checks the result.

Note: attributes. The opcode BUILD sets attributes on any object that a pickle can name, classes and functions of the running program
included, and these outlive the refusal of the file. Here it calls ``build`` of the subclass instead, which knows what it has made.

Time: linear in the bytes.
"""

from __future__ import annotations

import collections
import io
import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

MAX_KEY_PARTS = 100
"""How many parts a dict's key may have: a checkpoint's keys are names, numbers, and small tuples of these."""

MAX_DEPTH = 100
"""How deep containers may lie in one another. Readers descend into them by recursion."""

_LONG_KEY_NBYTES = 8
"""Integers of more bytes can be chosen so that their hashes are equal, and then a dict of n of them takes n**2 steps: no keys."""

_PASSED_PER_BYTE = 16
"""How many elements and characters the arguments of all calls may have per byte of the pickle: without sharing, at most one."""

_SIZED = (str, bytes, tuple, list, dict, set, frozenset)


_LOAD: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch
"""What each opcode does."""


def _keys_checked(opcode: bytes, part: slice) -> Callable[[Any], None]:
    """The opcode's function, which hashes ``part`` of the stack."""

    def checked(unpickler: BoundedUnpickler) -> None:
        check_keys(unpickler.stack[part])
        _LOAD[opcode[0]](unpickler)

    return checked


def _arguments_counted(opcode: bytes, count: int) -> Callable[[Any], None]:
    """The opcode's function, which passes the ``count`` containers on top of the stack to a call."""

    def counted(unpickler: BoundedUnpickler) -> None:
        for arguments in unpickler.stack[-count:]:
            unpickler.count(arguments)
        _LOAD[opcode[0]](unpickler)

    return counted


class BoundedUnpickler(pickle._Unpickler):
    """Subclasses define ``find_class``, ``persistent_load`` (by default nothing is stored elsewhere) and ``build``."""

    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._left = _PASSED_PER_BYTE * len(data) + 10_000

    def persistent_load(self, pid: Any) -> Any:
        """The object that ``pid`` refers to."""
        raise pickle.UnpicklingError(f"it refers to {str(pid)[:100]}, which is no storage")

    @abstractmethod
    def build(self, made: Any, state: Any) -> bool:
        """Give ``made`` its attributes. False if it is nothing that this unpickler makes: a class, a function, ..."""

    def count(self, arguments: Any) -> None:
        """Count what a call is to get, before it can copy that. Raises: UnpicklingError"""
        self._left -= len(arguments) + sum(len(each) for each in arguments if isinstance(each, _SIZED))
        if self._left < 0:
            raise pickle.UnpicklingError("it passes calls the same arguments again and again")

    def _load_build(self) -> None:
        state = self.stack.pop()
        if not self.build(self.stack[-1], state):
            raise pickle.UnpicklingError(f"it changes {str(self.stack[-1])[:100]}, which it has not made")

    def _load_bytearray(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))  # of the bytes that are there

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        self.count(arguments)
        self.append(kind(*arguments))

    dispatch = _LOAD | {
        pickle.BUILD[0]: _load_build,
        pickle.BYTEARRAY8[0]: _load_bytearray,
        pickle.REDUCE[0]: _arguments_counted(pickle.REDUCE, 1),
        pickle.NEWOBJ[0]: _arguments_counted(pickle.NEWOBJ, 1),
        pickle.NEWOBJ_EX[0]: _arguments_counted(pickle.NEWOBJ_EX, 2),
        pickle.SETITEM[0]: _keys_checked(pickle.SETITEM, slice(-2, -1)),
        pickle.SETITEMS[0]: _keys_checked(pickle.SETITEMS, slice(None, None, 2)),
        pickle.DICT[0]: _keys_checked(pickle.DICT, slice(None, None, 2)),
        pickle.FROZENSET[0]: _keys_checked(pickle.FROZENSET, slice(None)),
        pickle.ADDITEMS[0]: _keys_checked(pickle.ADDITEMS, slice(None)),
    }


def check_keys(keys: Iterable[Any]) -> None:
    """Bound what it costs to hash ``keys`` and to compare them. Raises: UnpicklingError"""
    for key in keys:
        if type(key) is str:
            continue
        todo, parts = [key], 0
        while todo:
            each = todo.pop()
            parts += 1
            if parts > MAX_KEY_PARTS or (type(each) is int and each.bit_length() > 8 * _LONG_KEY_NBYTES):
                raise pickle.UnpicklingError(
                    "it has a dict's key or a set's member of more than 100 parts, or a number of more than 8 bytes"
                )
            if isinstance(each, (tuple, frozenset)):
                todo.extend(list(each)[: MAX_KEY_PARTS + 1])


# The containers that a pickle may call: their keys cost no more than those that an opcode puts in.


def checked_set(items: Any = ()) -> set[Any]:
    return set(_checked(items))


def checked_frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_checked(items))


def checked_dict(items: Any = ()) -> dict[Any, Any]:
    pairs = list(items.items() if isinstance(items, dict) else items)
    check_keys(key for key, _ in pairs)
    return dict(pairs)


def checked_ordered_dict(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(checked_dict(items))


def _checked(items: Any) -> list[Any]:
    keys = list(items)
    check_keys(keys)
    return keys


def check_made(root: Any, max_parts: int) -> None:
    """Bound the cost of a walk through nested dicts, lists and tuples, which meets shared ones as often as they occur.

    Raises: UnpicklingError if that is more than ``max_parts`` objects, deeper than MAX_DEPTH, or endless
    """
    known: dict[int, tuple[int, int]] = {}
    under_way: set[int] = set()

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Parts and height."""
        if not isinstance(node, (dict, list, tuple, set, frozenset)):
            return 1, 0
        if id(node) in under_way:
            raise pickle.UnpicklingError("it has a container that contains itself")
        if id(node) not in known:
            under_way.add(id(node))
            parts, height = 1 + (len(node) if isinstance(node, dict) else 0), 1
            for each in (node.values() if isinstance(node, dict) else node) if depth <= MAX_DEPTH else ():
                below = measure(each, depth + 1)
                parts, height = parts + below[0], max(height, below[1] + 1)
            under_way.discard(id(node))
            known[id(node)] = parts, height
        parts, height = known[id(node)]
        if depth + height > MAX_DEPTH:
            raise pickle.UnpicklingError(f"its containers are nested more than {MAX_DEPTH} deep")
        if parts > max_parts:
            raise pickle.UnpicklingError(f"it describes more than {max_parts} objects in containers that are shared again and again")
        return parts, height

    measure(root, 0)


# --- files of torch.save ----------------------------------------------------------------------------------------------------------


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
        return isinstance(made, (Inert, collections.OrderedDict))  # nobody needs a state dict's attributes

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
