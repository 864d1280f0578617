"""Parameters that define their own all-gather: tensors with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

Such a tensor (usually a subclass: float8 with a scale, 4-bit blocks, ...) is no piece of a flat shard. It keeps memory
of its own, turns its shard into plain tensors to send, and makes the unsharded parameter from the gathered ones. fsdp2
sends the values of a tensor subclass without the two methods, in ``param_dtype``. The contract is torch FSDP2's:

    fsdp_pre_all_gather(mesh), or (mesh, outer_size, outer_stride, module, mp_policy)
        -> (tensors to send, metadata). Shapes and dtypes are the same on all ranks and in all steps. If dtypes differ
        between tensors, fsdp2 sends all as bytes. If the ranks' shards have different numbers of rows, this file pads
        tensors that have a row for each row of the shard.
    fsdp_post_all_gather(gathered, metadata, param_dtype, *, out=None)
        out None:  the first time -> (unsharded tensor, tensors whose storages reshard is to free). The method makes the
                   tensor once, as fsdp2 makes every unsharded parameter, because autograd's saved views alias it
        else:      fsdp2 has allocated the storages again and filled ``gathered``. The method writes all values that do
                   not alias ``gathered`` into ``out``, the unsharded parameter (with tensor parallelism, a DTensor)

    fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool, optional
        asked at fully_shard and at the first unshard
        True: fsdp2 frees ``gathered`` as soon as fsdp_post_all_gather has returned, which must not make views of it

fsdp2 looks the methods up on the local tensor, because users patch instances: at each unshard of a parameter with
memory of its own, else at the first unshard after fully_shard, ``_apply`` or a change of the local tensor. This file
calls the methods and checks their results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ExtensionError
from ...torch_names import torch_autograd, torch_dtensors, torch_tensors
from ..plan.layout import contiguous_strides, rows_of
from ..plan.mesh import DataParallelMesh
from .own_memory import POST, PRE, RELEASE, has_extension, missing_half
from .param import ShardedParam

Kinds = Sequence[tuple[list[torch.Size], list[torch.dtype]]]
"""For each parameter, the shapes and dtypes of what it sends."""


class Extensions:
    """Asks parameters with memory of their own for the tensors to send, and for the unsharded parameter."""

    def __init__(self, mesh: DataParallelMesh, device: torch.device, param_dtype: torch.dtype, mp_policy: Any) -> None:
        """device: where the tensors to send have to lie. param_dtype: a parameter without extension is sent in it."""
        self._mesh = _shard_mesh(mesh)
        self._device = device
        self._param_dtype = param_dtype
        self._mp_policy = mp_policy
        self._num_arguments: dict[object, int] = {}

    def to_send(self, param: ShardedParam, non_blocking: bool) -> tuple[list[Tensor], Any]:
        """(plain tensors on the device, padded to the same shapes on all ranks; metadata).

        Collective: an extension may communicate over the shard axis.
        Raises:     ExtensionError on every rank if the contract is broken.
        """
        local = param.local
        there = local if local.device == self._device else local.to(self._device, non_blocking=non_blocking)
        if not has_extension(local):
            return [_values(param, there, self._param_dtype)], None
        problem = missing_half(local) or (None if param.spec.order is None else "is not contiguous")
        if problem is not None:
            raise ExtensionError(
                f"{param.fqn} of type {type(local).__name__} {problem}",
                expected=f"a contiguous parameter with both {PRE} and {POST}",
                fix="define both, or neither",
            )
        pre = getattr(there, PRE, None) or getattr(local, PRE)
        arguments: list[Any] = [self._mesh]
        if self._count_arguments(param, pre) == 5:
            shape = param.spec.cut.shape
            arguments += [torch.Size(shape), contiguous_strides(shape), param.owners[0].module, self._mp_policy]
        returned = pre(*arguments)
        tensors = returned[0] if isinstance(returned, (tuple, list)) and len(returned) == 2 else None
        if (
            not isinstance(tensors, (tuple, list))
            or not tensors
            or not all(isinstance(each, Tensor) for each in tensors)
        ):
            raise _error(param, PRE, f"returned {_brief(returned)}", "(a non-empty tuple of tensors, metadata)")
        return [_plain(each) for each in _padded(param, tensors)], returned[1]

    def _count_arguments(self, param: ShardedParam, pre: Callable[..., Any]) -> int:
        key = getattr(pre, "__func__", pre)
        count = self._num_arguments.get(key)
        if count is None:
            count = self._num_arguments[key] = len(inspect.signature(pre).parameters)
        if count not in (1, 5):
            takes = f"takes {inspect.signature(pre)}"
            raise _error(param, PRE, takes, "(self, mesh) or (self, mesh, outer_size, outer_stride, module, mp_policy)")
        return count

    def make_unsharded(
        self, param: ShardedParam, gathered: tuple[Tensor, ...], metadata: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The first time: (unsharded tensor of the physical shape, tensors that reshard frees besides ``gathered``)."""
        shape = param.spec.cut.shape
        whole, kept = gathered[0], ()
        if has_extension(param.local):
            returned = getattr(param.local, POST)(gathered, metadata, self._param_dtype)
            if not isinstance(returned, (tuple, list)) or len(returned) != 2 or not isinstance(returned[0], Tensor):
                raise _error(param, POST, f"returned {_brief(returned)}", "(a tensor, a tuple of tensors to free)")
            whole, kept = returned[0], tuple(returned[1])
        try:
            return torch.as_strided(whole, shape, contiguous_strides(shape), 0), kept
        except Exception as error:
            what = (
                f"returned {_brief(whole)}, which torch.as_strided cannot see as {shape}: "
                f"{type(error).__name__}: {error}"
            )
            raise _error(param, POST, what, "a tensor of that shape, or larger, with as_strided") from error

    def refill_unsharded(
        self, param: ShardedParam, gathered: tuple[Tensor, ...], metadata: Any, kept: tuple[Tensor, ...]
    ) -> None:
        """From the second time on: write into the unsharded parameter all values that do not alias ``gathered``.

        kept: from ``make_unsharded``
        """
        post = getattr(param.local, POST, None)
        if post is None:
            return
        unsharded = param.unsharded
        assert unsharded is not None
        local = torch_dtensors.local_of(unsharded)
        # The method writes the values that autograd has saved views of: for autograd nothing has changed.
        with torch_autograd.preserved_versions((unsharded, local, *kept)):
            post(gathered, metadata, self._param_dtype, out=unsharded)


def require_same_kinds(params: Sequence[ShardedParam], before: Kinds, now: Kinds) -> None:
    """Raise ExtensionError naming the first parameter that sends tensors of other shapes or dtypes than before."""
    for param, earlier, kinds in zip(params, before, now, strict=True):
        if earlier != kinds:
            what = f"returned tensors of {_kinds(*kinds)}, but of {_kinds(*earlier)} before"
            raise _error(param, PRE, what, "the same shapes and dtypes every time")


def releases_gathered(param: ShardedParam) -> bool:
    """Whether the parameter asks to free the gathered tensors as soon as its unsharded parameter is made."""
    if not hasattr(param.local, RELEASE):
        return False
    answer = getattr(param.local, RELEASE)()
    if not isinstance(answer, bool):
        raise _error(param, RELEASE, f"returned {answer!r}", "a bool")
    return answer


def _padded(param: ShardedParam, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, padded to the same shapes on all ranks. The check is the same on all ranks: all raise or none."""
    cut = param.spec.cut
    dim = cut.dim
    if dim is None or cut.num_shards == 1 or (dim == 0 and cut.shape[0] % cut.num_shards == 0):
        return list(tensors)
    own = len(rows_of(cut.shape[dim], param.rank, cut.num_shards))
    most = cut.shard_shape(0)[dim]
    padded = []
    for tensor in tensors:
        if tensor.ndim <= dim or tensor.shape[dim] not in (own, most):
            raise _error(
                param,
                PRE,
                f"returned a tensor of shape {tuple(tensor.shape)} for a shard of shape {tuple(param.local.shape)}",
                f"tensors whose dim {dim} has the size of the shard's, or {most}, which it is padded to: "
                f"{cut.shape} is cut there over {cut.num_shards} ranks",
            )
        if tensor.shape[dim] < most:
            room = torch.zeros(
                (*tensor.shape[:dim], most, *tensor.shape[dim + 1 :]), dtype=tensor.dtype, device=tensor.device
            )
            room.narrow(dim, 0, own).copy_(tensor)
            tensor = room
        padded.append(tensor)
    return padded


def _shard_mesh(mesh: DataParallelMesh) -> DeviceMesh:
    """The 1-D mesh that an extension sees: the shard axis, or the only axis there is."""
    names = mesh.mesh.mesh_dim_names
    if mesh.mesh.ndim == 1 or names is None or mesh.shard_axis is None:
        return mesh.mesh
    return mesh.mesh[names[mesh.shard_axis]]


def _values(param: ShardedParam, local: Tensor, dtype: torch.dtype) -> Tensor:
    """The payload of a shard without extension: a plain tensor in ``dtype``, padded to the largest shard's shape."""
    cut = param.spec.cut
    padded = torch.zeros(cut.shard_shape(0), dtype=dtype, device=local.device)
    place = padded if cut.dim is None else padded.narrow(cut.dim, 0, cut.shard_shape(param.rank)[cut.dim])
    try:
        place.copy_(param.spec.to_physical(local))
    except Exception as error:
        raise ExtensionError(
            f"{param.fqn} of type {type(local).__name__} cannot be all-gathered: it has no {PRE}, and copying "
            f"its values into a plain tensor failed with {type(error).__name__}: {error}",
            expected=f"a tensor subclass with {PRE} and {POST}, or one that a plain tensor can be copied from",
            fix="add the two methods to the class, or pass the parameter in ignored_params",
        ) from error
    return padded


def _plain(tensor: Tensor) -> Tensor:
    wraps: bool = torch_tensors.is_traceable_wrapper_subclass(tensor)
    if not wraps:
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor)
    return plain


def _error(param: ShardedParam, method: str, what: str, expected: str) -> ExtensionError:
    return ExtensionError(
        f"{method} of {param.fqn} ({type(param.local).__name__} {tuple(param.local.shape)}) {what}",
        expected=expected,
        fix=f"change {method}; the docstring of fsdp2.core.group.extensions describes it",
    )


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_brief(each) for each in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _kinds(shapes: list[torch.Size], dtypes: list[torch.dtype]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True))
