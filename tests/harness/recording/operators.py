"""Every operator on the CPU, with the tensors that it reads, writes, or only looks at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fsdp2.torch_names import torch_tensors

Seen = TypeVar("Seen")


class Observer(Protocol[Seen]):
    """Hears of each operator. The result of ``before_operator`` comes back with the operator's results."""

    def before_operator(
        self, what: str, reads: list[Tensor], writes: list[Tensor], others: list[Tensor], blocks: bool = False
    ) -> Seen: ...

    def after_operator(self, touch: Seen, outputs: list[Tensor]) -> None: ...

    def transfer(self, tensor: Tensor, target: object, non_blocking: bool) -> AbstractContextManager[bool]: ...

    def keep_on_host(self, tensor: Tensor) -> None: ...


@contextlib.contextmanager
def watched(by: Observer[Any]) -> Iterator[None]:
    """Inside, ``by`` is told of every operator."""
    with _replaced_functions(by), _Operators(by):
        yield


class _Operators(torch_tensors.TorchDispatchMode):
    """Files every operator that runs under it, in backward as well: on the CPU, that is on the calling thread."""

    def __init__(self, observer: Observer[Any]) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        subclasses = [kind for kind in types if torch_tensors.has_own_dispatch(kind)]
        if torch_tensors.FakeTensor in subclasses:  # it has no memory
            return func(*args, **kwargs)
        if subclasses:
            return NotImplemented  # a DTensor, say: it comes back with its local tensors
        roles = _roles.get(func)
        if roles is None:
            roles = _roles[func] = _Roles(func)
        if roles.is_view:
            return func(*args, **kwargs)
        blocks = roles.name == "aten.copy_" and not (kwargs.get("non_blocking", False) or args[2:] == (True,))
        touch = self._observer.before_operator(roles.name, *roles.sort(args, kwargs), blocks=blocks)
        result = func(*args, **kwargs)
        outputs: list[Tensor] = []
        _find(result, outputs)
        self._observer.after_operator(touch, outputs)
        return result


@contextlib.contextmanager
def _replaced_functions(observer: Observer[Any]) -> Iterator[None]:
    """Also sees reads by the host, ``to``, which from CPU to CPU does nothing, and pinned memory, which are no operators.

    By replacing functions: torch function modes, which are made for this, are not active in backward.
    """

    def seen_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is Tensor and args:
            with observer.transfer(tensor, args[0], kwargs.get("non_blocking", False)) as must_copy:
                return to(tensor, *args, **({**kwargs, "copy": True} if must_copy else kwargs))
        return to(tensor, *args, **kwargs)

    def seen_read(read: Any) -> Any:
        def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads: list[Tensor] = []
            _find(tensor, reads)
            observer.before_operator(read.__name__, reads, [], [])
            return read(tensor, *args, **kwargs)

        return seen

    def seen_allocation(allocate: Any) -> Any:
        def seen(*args: Any, **kwargs: Any) -> Any:
            tensor = allocate(*args, **{**kwargs, "pin_memory": False})
            if kwargs.get("pin_memory"):
                observer.keep_on_host(tensor)
            return tensor

        return seen

    to = Tensor.to
    methods = {"to": seen_to, "tolist": seen_read(Tensor.tolist), "numpy": seen_read(Tensor.numpy)}
    functions = {"empty": torch.empty, "zeros": torch.zeros}
    for name, method in methods.items():
        assert name not in vars(Tensor), f"another recording is active: Tensor.{name} is replaced"
        setattr(Tensor, name, method)
    for name, function in functions.items():
        setattr(torch, name, seen_allocation(function))
    try:
        yield
    finally:
        for name in methods:
            delattr(Tensor, name)  # the methods themselves are its base class's
        for name, function in functions.items():
            setattr(torch, name, function)


# c10d's schemas do not tell what they write.
_COLLECTIVE_WRITES = {
    "_allgather_base_": {"output_tensor"},
    "_reduce_scatter_base_": {"output_tensor"},
    "allgather_": {"output_tensors"},
    "allgather_coalesced_": {"output_lists"},
    "allgather_into_tensor_coalesced_": {"outputs"},
    "allreduce_": {"tensors"},
    "allreduce_coalesced_": {"tensors"},
    "alltoall_": {"output_tensors"},
    "alltoall_base_": {"output"},
    "barrier": set(),
    "broadcast_": {"tensors"},
    "gather_": {"output_tensors"},
    "recv_": {"tensors"},
    "recv_any_source_": {"tensors"},
    "reduce_": {"tensors"},
    "reduce_scatter_": {"output_tensors"},
    "reduce_scatter_tensor_coalesced_": {"outputs"},
    "scatter_": {"output_tensors"},
    "send": set(),
}

# These look at shapes, or set them, but touch no element of their arguments.
_SHAPE_ONLY = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_pinned", "is_same_size"),
    *("_unsafe_view", "set_", "resize_", "resize_as_", "record_stream", "barrier"),
}


class _Roles:
    """Which arguments of one operator are read, and which are written."""

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        namespace, _, base = schema.name.partition("::")
        self.name = f"{namespace}.{base}"
        aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
        self.is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
        self._names = [argument.name for argument in schema.arguments]
        self._touches = base not in _SHAPE_ONLY
        if namespace == "c10d":
            self._writes = _COLLECTIVE_WRITES.get(base, set(self._names))
        else:
            self._writes = {
                argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
            }

    def sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The tensors that the operator reads, those that it writes, and those that it does neither with."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            _find(value, writes if name in self._writes else reads)
        return (reads, writes, []) if self._touches else ([], [], reads + writes)


_roles: dict[Any, _Roles] = {}


def _find(value: Any, found: list[Tensor]) -> None:
    """The tensors in ``value`` that have memory."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_meta and not torch_tensors.has_own_dispatch(type(value)):
            found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _find(item, found)
