"""Tensors: their devices, the storage under them, the dtype of their gradients, and operators on lists of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from . import torch_name

__all__ = ["FakeTensor", "TorchDispatchMode", "pytree"]  # in addition to the names that are defined here

if TYPE_CHECKING:
    from torch._subclasses import FakeTensor
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    FakeTensor = torch_name("torch._subclasses.FakeTensor")  # if gone, none is recognized
    TorchDispatchMode = torch_name("torch.utils._python_dispatch.TorchDispatchMode")
    pytree = torch_name("torch.utils._pytree")


# Inside, attributes of DTensors are read and set in half the time: torch does not ask their class first.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch_name("torch._C.DisableTorchFunctionSubclass", nullcontext)
with_torch_function: Callable[[], AbstractContextManager[Any]] = torch_name("torch._C._EnableTorchFunction", nullcontext)


def default_device_type() -> str:
    """The accelerator's type if there is one that is usable, and has streams, else "cpu"."""
    found = str(torch._C._get_accelerator().type)
    return found if has_streams(found) else "cpu"


def has_streams(device_type: str) -> bool:
    """Whether torch can order work on such devices, as on "cuda"; True for "cpu", where work runs when it is started.

    torch.mps has streams from 2.15 on, but none that belong to a device.
    """
    return device_type == "cpu" or all(hasattr(torch.get_device_module(device_type), name) for name in ("Stream", "current_device"))


def current_device(device_type: str) -> torch.device:
    """This rank's device of that type."""
    return (
        torch.device("cpu")
        if device_type == "cpu"
        else torch.device(device_type, torch.get_device_module(device_type).current_device())
    )


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give ``tensor`` the values of ``data``, on the device of either; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    # ``.data`` refuses tensors of different types, such as the CPU's and those of third-party devices (PrivateUse1).
    if isinstance(tensor, nn.Parameter):
        data = nn.Parameter(data, requires_grad=tensor.requires_grad)
    become(tensor, data)


def become(tensor: Tensor, other: Tensor) -> None:
    """Let ``tensor`` be what ``other`` is; it stays the same object. Both must have no gradient, and no weak references."""
    swap: Any = torch.utils.swap_tensors
    swap(tensor, other)


def allow_any_grad_dtype(param: Tensor) -> None:
    """Let ``param.grad`` have another dtype than ``param``."""
    param.grad_dtype = None


_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


INSTALLED_SEMANTICS: Literal["2.13", "2.15"] = "2.15" if _VERSION >= (2, 15) else "2.13"
"""Whose numbers torch's own FSDP2 has here: from 2.15 on, it asks each parameter for ``grad_dtype``."""


class GradDtype(NamedTuple):
    """A ``grad_dtype`` that somebody has set; None: gradients stay in the dtype in which they come."""

    dtype: torch.dtype | None


def grad_dtype_of(param: Tensor) -> GradDtype | None:
    """The ``grad_dtype`` set on a leaf, or None. Before torch 2.15, setting the leaf's own dtype goes unnoticed."""
    dtype: torch.dtype | None = param.grad_dtype
    was_set = getattr(param, "_has_grad_dtype_override", dtype is not param.dtype)
    return GradDtype(dtype) if was_set else None


def set_grad_dtype(param: Tensor, grad_dtype: GradDtype) -> None:
    param.grad_dtype = grad_dtype.dtype


def with_own_storage(tensor: Tensor) -> Tensor:
    """The same bytes under another storage object, which covers only these and keeps ``tensor`` alive: a DLPack import.

    Such a storage belongs to no allocator of torch: ``record_stream`` does nothing, and on CUDA it cannot be sent to
    another process (IPC finds blocks by their first byte). Send a clone.

    A fake tensor has no bytes: its own storage does.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    dlpack: Any = torch.utils.dlpack
    # As a capsule: the protocol's method of a tensor knows only the devices that torch itself names.
    return dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[no-any-return]


def storage_key(tensor: Tensor | torch.UntypedStorage) -> int:
    """Identifies a storage object, or that under ``tensor``, as long as it lives."""
    return int((tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor)._cdata)


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether both begin at the same byte, even under different storage objects."""
    if isinstance(tensor, FakeTensor):  # it has no address
        return storage_key(tensor) == storage_key(other) and tensor.storage_offset() == other.storage_offset()
    return tensor.data_ptr() == other.data_ptr()


def address_of(storage: torch.UntypedStorage) -> int:
    """Different for memory that is different; of a fake tensor's storage, the object's own."""
    return int(storage._cdata) if storage.device.type == "meta" else int(storage.data_ptr())


def has_storage_of_its_own(tensor: Tensor) -> bool:
    """False for a wrapper subclass, whose storage has a size but no bytes: tensors in its attributes have them."""
    if type(tensor) is Tensor or isinstance(tensor, FakeTensor) or tensor.is_meta:
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch's way to say so
        return False
    return True


def has_own_dispatch(kind: type) -> bool:
    """Whether a tensor class runs operators in its own way."""
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def is_traceable_wrapper_subclass(tensor: object) -> bool:
    """Whether ``tensor`` has other tensors in its attributes, and tells which."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__")


def chunk_cat(tensors: list[Tensor], num_chunks: int, out: Tensor) -> None:
    """Cut every tensor along dim 0 like ``torch.chunk``, pad the pieces with zeros, and lay them into ``out``.

    tensors: any shapes of at least one dim, one dtype
    out:     (num_chunks, n): row i gets piece i of every tensor, one after another, in the dtype of ``out``
    """
    torch._chunk_cat(tensors, 0, num_chunks, out=out)
