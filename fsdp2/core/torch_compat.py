"""Every private torch name in use, and every difference between torch 2.11 and 2.15, in one place.

Nothing here has logic of its own: a name is re-exported, or wrapped so that its callers need not know the torch
version. When a torch release breaks fsdp2, this is the file to fix. If a release drops a name, only the feature that
uses it fails, not ``import fsdp2`` (``torch_name``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.utils.checkpoint
import torch.utils.dlpack
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor, Placement, Shard

from ..errors import FSDPError

__all__ = [  # torch's names that other files take from here, in addition to those defined below
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "FakeTensor",
    "TensorMeta",
    "TorchDispatchMode",
    "TorchFSDPModule",
    "TorchUnshardHandle",
    "forward_ad",
    "pytree",
]


class _Gone(type):
    """The type of a class that stands for a name that this torch lacks: it has no instances, and its use raises."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _gone_error(cls.path)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python asks every class for some of these
            raise AttributeError(name)
        raise _gone_error(cls.path)


def _gone_error(path: str) -> FSDPError:
    return FSDPError(
        f"torch {torch.__version__} has no {path}, which this needs",
        expected="a version of torch that fsdp2 was tested with, 2.11 to 2.15",
        fix="install one of these, or a newer fsdp2",
    )


def torch_name(path: str, instead: Any = None) -> Any:
    """The private torch name ``path``; if it is gone: ``instead``, or a class whose every use raises an FSDPError."""
    home, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError):
        return _Gone(name, (), {"path": path}) if instead is None else instead


if TYPE_CHECKING:
    from torch._subclasses import FakeTensor
    from torch.distributed._composable_state import _State
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class TorchGradientReductionHandle:
        """torch's class of the same name (2.15), so that ``isinstance`` checks elsewhere hold."""

else:  # next to or above a name, what happens if it is gone; where nothing stands, its first use raises
    FakeTensor = torch_name("torch._subclasses.FakeTensor")  # none is recognized
    # If gone, none is recognized.
    AsyncCollectiveTensor = torch_name("torch.distributed._functional_collectives.AsyncCollectiveTensor")
    DTensorSpec = torch_name("torch.distributed.tensor._dtensor_spec.DTensorSpec")
    TensorMeta = torch_name("torch.distributed.tensor._dtensor_spec.TensorMeta")
    _StridedShard = torch_name("torch.distributed.tensor.placement_types._StridedShard")  # no tensor parallelism
    _State = torch_name("torch.distributed._composable_state._State", object)  # torch does not find our states by type
    TorchDispatchMode = torch_name("torch.utils._python_dispatch.TorchDispatchMode")
    pytree = torch_name("torch.utils._pytree")
    TorchGradientReductionHandle = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)

_torch_fsdp2 = torch_name("torch.distributed.fsdp._fully_shard._fully_shard", torch.distributed.fsdp)
# If these are gone, torch does not see our calls, or does not find our states.
_REGISTRY_KEY = torch_name("torch.distributed._composable.contract.REGISTRY_KEY", "_fsdp2_registry")
_STATE_KEY = torch_name("torch.distributed._composable.contract.STATE_KEY", "_fsdp2_states")
_RegistryItem = torch_name("torch.distributed._composable.contract.RegistryItem", object)
_get_module_state = torch_name("torch.distributed._composable_state._get_module_state", lambda module: None)
# If gone, torch's own modules are not inspected.
_TorchFSDPState = torch_name("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState")
_insert_module_state = torch_name(
    "torch.distributed._composable_state._insert_module_state", lambda module, state: None
)
# Without these, the public ``torch.compiler.disable`` does their work: it imports the compiler, and hooks are slower.
_eval_frame = "torch._C._dynamo.eval_frame."
_get_eval_frame_callback = torch_name(f"{_eval_frame}get_eval_frame_callback", False)
_set_code_exec_strategy = torch_name(f"{_eval_frame}set_code_exec_strategy", False)
_FrameAction = torch_name(f"{_eval_frame}_FrameAction", False)
_FrameExecStrategy = torch_name(f"{_eval_frame}_FrameExecStrategy", False)
_CAN_SKIP_FRAMES = all((_get_eval_frame_callback, _set_code_exec_strategy, _FrameAction, _FrameExecStrategy))

REBUILD_TENSOR = torch_name("torch._utils._rebuild_tensor_v2")
REBUILD_TENSOR_OF_DTYPE = torch_name("torch._utils._rebuild_tensor_v3")
"""The functions that ``torch.load`` calls to make a tensor of a typed storage, and of an untyped one."""


_F = TypeVar("_F", bound=Callable[..., Any])

# --- collectives: looked up on torch.distributed when called, so that tools which patch or count them see ours --------


if hasattr(dist, "all_gather_single"):  # torch 2.13; it deprecates the older names

    def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
        return dist.all_gather_single(output, input, group=group, async_op=async_op)  # type: ignore[no-any-return]

    def reduce_scatter_single(
        output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        return dist.reduce_scatter_single(  # type: ignore[no-any-return]
            output, input, op=op, group=group, async_op=async_op
        )

else:  # torch 2.11 and 2.12

    def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)  # type: ignore[no-any-return]

    def reduce_scatter_single(
        output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        return dist.reduce_scatter_tensor(  # type: ignore[no-any-return]
            output, input, op=op, group=group, async_op=async_op
        )


class one_launch:  # noqa: N801 (a context manager)
    """Collectives of one group that are issued inside, of any kind, dtype and reduction, become one launch at its end.

    For backends that are ordered by streams; pass ``async_op=False``. torch's own manager takes one kind and one
    reduction, and opens two nested NCCL groups if it is given a device.
    """

    __slots__ = ("_device", "_group")

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group: Any = group
        self._device = device

    def __enter__(self) -> None:
        self._group._start_coalescing(self._device)

    def __exit__(self, *error: object) -> None:
        work = self._group._end_coalescing(self._device)
        if work is not None:
            work.wait()


def process_group_empty(group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) from the allocator of the group's backend, or from the usual one if it has none."""
    if not process_group_allocates(group, device):
        return torch.empty(numel, dtype=dtype, device=device)
    backend: Any = group._get_backend(device)
    return backend.allocate_tensor(numel, dtype=dtype, device=device)  # type: ignore[no-any-return]


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """The device of tensors that ``group`` sends."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def keys_of_the_store(prefix: str) -> Any:
    """Keys of the default process group's store, for the main thread."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(prefix, c10d._get_default_store())


def own_connection_to_the_store(prefix: str) -> Any:
    """Keys of the same store, for another thread: on a shared connection, one wait blocks all threads."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(prefix, c10d._get_default_store().clone())


def timeout_of_group(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of ``group`` waits for a rank; None if its backend does not tell."""
    backend: Any = group._get_backend(device_of_group(group))
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    return getattr(getattr(backend, "options", None), "_timeout", None)


def new_named_group(
    ranks: list[int], backend: str | None, description: str, name: str, timeout: timedelta | None
) -> dist.ProcessGroup:
    """A process group under a name that its ranks have agreed on; torch's own count of groups does not change.

    Collective: yes, over ``ranks``.
    """
    c10d: Any = dist.distributed_c10d
    own = threading.get_ident()

    def name_of(*args: Any, **kwargs: Any) -> str:
        return name if threading.get_ident() == own else torch_names(*args, **kwargs)

    with _naming:
        if "pg_names" in c10d._hash_ranks_to_str.__code__.co_names:  # before torch 2.14
            c10d._pg_names = _NamesOfOthers.of(c10d._pg_names)
            c10d._pg_names.not_counted.add(name)
        torch_names = c10d._process_group_name
        c10d._process_group_name = name_of
        try:
            made = dist.new_group(ranks, timeout, backend, use_local_synchronization=True, group_desc=description)
        finally:
            c10d._process_group_name = torch_names
    assert isinstance(made, dist.ProcessGroup)
    return made


_naming = threading.Lock()


class _NamesOfOthers(dict[dist.ProcessGroup, str]):
    """The names of all process groups; ``len`` counts those that are not ours.

    Before torch 2.14, ranks that make a group among themselves find each other under a name with this length in it.
    Ranks that have a group of ours would wait forever for ranks that have none.
    """

    not_counted: set[str]

    @classmethod
    def of(cls, names: dict[dist.ProcessGroup, str]) -> _NamesOfOthers:
        if isinstance(names, cls):
            return names
        new = cls(names)
        new.not_counted = set()
        return new

    def __len__(self) -> int:
        return sum(name not in self.not_counted for name in self.values())


def process_group_allocates(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        return bool(group._get_backend(device).supports_tensor_alloc(device))
    except RuntimeError:  # a group without a backend for this device
        return False


def init_symmetric_memory(group: dist.ProcessGroup, backend: str) -> None:
    """Choose the backend of symmetric memory and make sure of the group's communicator. Collective: yes."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    dist.barrier(group=group)  # an empty communicator could not rendezvous


def symmetric_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
        return torch.empty(numel, dtype=dtype, device=device)


def rendezvous(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Exchange the addresses of a symmetric buffer. Collective: yes, the first time for its allocation."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.rendezvous(tensor, group=group.group_name)


# --- meshes -----------------------------------------------------------------------------------------------------------


def default_device_type() -> str:
    """The accelerator's type if there is one that is usable, and has streams, else "cpu"."""
    found = str(torch._C._get_accelerator().type)
    return found if has_streams(found) else "cpu"


def has_streams(device_type: str) -> bool:
    """Whether torch can order work on such devices, as on "cuda"; True for "cpu", where work runs when it is started.

    torch.mps has streams from 2.15 on, but none that belong to a device.
    """
    return device_type == "cpu" or all(
        hasattr(device_module(device_type), name) for name in ("Stream", "current_device")
    )


def device_module(device_type: str) -> Any:
    """``torch.cuda`` for "cuda" and so on; a stand-in with the same names for "cpu"."""
    return torch.get_device_module(device_type)


def current_device(device_type: str) -> torch.device:
    """This rank's device of that type."""
    return (
        torch.device("cpu")
        if device_type == "cpu"
        else torch.device(device_type, device_module(device_type).current_device())
    )


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh over the named axes of ``mesh``. Collective the first time that it makes a process group."""
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[names]._flatten("_".join(names))


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh whose axes are those of ``meshes`` in order; all must come from one root mesh."""
    return DeviceMesh._concatenate(meshes)


def unflatten_mesh(mesh: DeviceMesh, axis: int, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """``mesh`` with one axis cut into several. Collective over the root mesh's ranks: it makes process groups."""
    return mesh._unflatten(axis, shape, names)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of a tensor that other axes of ``split_factor`` ranks have cut on ``dim`` before this one."""
    return _StridedShard(dim, split_factor=split_factor)


def shard_dim(placement: Placement) -> int | None:
    """The dim that a placement cuts; None if it does not."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


# --- DTensors ---------------------------------------------------------------------------------------------------------


new_dtensor: Callable[[Tensor, DTensorSpec], DTensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)
"""A DTensor over a local tensor and a spec, without autograd and checks: 2 us where ``DTensor.from_local`` takes 19."""


def waited_for(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or the result of the functional collective that it stands for."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def local_tensor(tensor: DTensor) -> Tensor:
    return tensor._local_tensor


def spec_of(tensor: Tensor) -> DTensorSpec:
    """The spec of a tensor that is a DTensor."""
    assert isinstance(tensor, DTensor)
    return tensor._spec


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Let ``tensor`` keep its data in ``local`` from now on; same shape, dtype and device."""
    tensor._local_tensor = local


def set_mesh(tensor: DTensor, mesh: DeviceMesh) -> None:
    """Let ``tensor`` lie on ``mesh``, which is equal to its own.

    torch caches results of operators on DTensors by equality: ``to_empty`` may return a tensor on the mesh of an
    earlier world, whose process groups are destroyed.
    """
    tensor._spec = replace(tensor._spec, mesh=mesh)


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give ``tensor`` the values of ``data``, on the device of either; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    # ``.data`` refuses tensors of different types, such as the CPU's and those of third-party devices (PrivateUse1).
    if isinstance(tensor, nn.Parameter):
        data = nn.Parameter(data, requires_grad=tensor.requires_grad)
    swap: Any = torch.utils.swap_tensors
    swap(tensor, data)


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


def swap_tensors(one: Tensor, other: Tensor) -> None:
    """Exchange what two tensor objects are, so that everybody who holds ``one`` has what ``other`` was."""
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


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


def storage_key(tensor: Tensor) -> int:
    """Identifies the storage object under ``tensor`` as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


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


def is_traceable_wrapper_subclass(tensor: object) -> bool:
    """Whether ``tensor`` has other tensors in its attributes, and tells which."""
    return (
        isinstance(tensor, Tensor) and hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__")
    )


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors and others share the storage of ``tensor``; 1 if none does."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less ``storage`` itself


# --- operators --------------------------------------------------------------------------------------------------------


def chunk_cat(tensors: list[Tensor], num_chunks: int, out: Tensor) -> None:
    """Cut every tensor along dim 0 like ``torch.chunk``, pad the pieces with zeros, and lay them into ``out``.

    tensors: any shapes of at least one dim, one dtype
    out:     (num_chunks, n): row i gets piece i of every tensor, one after another, in the dtype of ``out``
    """
    torch._chunk_cat(tensors, 0, num_chunks, out=out)


# --- autograd ---------------------------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = torch_name("torch._C._current_graph_task_id")  # -1 outside of backward
# Call it only inside backward.
will_run_in_this_backward: Callable[[Any], bool] = torch_name("torch._C._will_engine_execute_node")


def checkpoint_around() -> object | None:
    """An object, for weak references, that stands for the outermost running checkpoint that is not re-entrant.

    One in another is recomputed with the other.
    """
    autograd: Any = torch._C._autograd
    found = None
    taken = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        if hooks[0].__module__ == "torch.utils.checkpoint":
            found = hooks[0]
        if not autograd._saved_tensors_hooks_is_enabled():  # then none can be put back
            break
        autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    for pack, unpack in reversed(taken):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found


def leaf_gets_gradient_in_this_backward(leaf: Tensor) -> bool:
    """Whether the backward that is running puts a gradient into ``leaf``; only inside backward."""
    try:
        return will_run_in_this_backward(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # of a leaf that ``torch.autograd.grad`` was asked for
        return True


# If gone, profiles lack our labels.
profiler_is_on: Callable[[], bool] = torch_name("torch._C._autograd._profiler_enabled", lambda: False)
functorch_is_active: Callable[[], bool] = torch_name("torch._C._are_functorch_transforms_active")


def preserved_versions(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """Inside, autograd does not notice writes to ``tensors``."""
    context: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
    return context(tensors)  # type: ignore[no-any-return]


def queue_end_of_backward(callback: Callable[[], None]) -> bool:
    """Run ``callback``, outside of transforms, when the current graph task (the innermost backward) has finished.

    Returns: False, and queues nothing, if a compiler replaces what the autograd engine does, hooks included
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
        return False
    run = callback
    if functorch_is_active():

        def run() -> None:
            with functorch_disabled():
                callback()

    torch.autograd.Variable._execution_engine.queue_callback(run)
    return True


def caller_of_hooks() -> types.FrameType | None:
    """The innermost frame outside of our hooks and the compiler's wrappers: usually that of ``nn.Module.__call__``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
        frame = frame.f_back
    return frame


_HOOKS = (__name__.removesuffix("torch_compat"), "torch._dynamo.")  # not by paths: anybody may have such a one


def a_module_has_failed() -> bool:
    """In a forward hook with ``always_call``: whether forward, or another hook, has raised."""
    error = sys.exc_info()[1]
    # Somebody may also run a whole forward while handling an exception: that was not caught where modules are called.
    return error is not None and error.__traceback__ is not None and error.__traceback__.tb_frame is caller_of_hooks()


def functorch_disabled() -> AbstractContextManager[Any]:
    return torch._C._DisableFuncTorch()


def levels_of(tensor: Tensor) -> list[Tensor]:
    """``tensor``, the tensors that transforms of ``torch.func`` wrapped in it, and tangents: each has its own graph.

    Only tangents of the innermost transform.
    """
    functorch: Any = torch._C._functorch
    stack = functorch.peek_interpreter_stack() if functorch_is_active() else None
    has_tangents = forward_ad._current_level >= 0 and (stack is None or stack.key() == functorch.TransformType.Jvp)
    found = [tensor]
    for each in found:  # grows
        if functorch.is_functorch_wrapped_tensor(each):
            found.append(functorch.get_unwrapped(each))
        if has_tangents:
            tangent = forward_ad.unpack_dual(each).tangent  # type: ignore[no-untyped-call]
            if tangent is not None:
                found.append(tangent)
    return found


_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT) if _CAN_SKIP_FRAMES else None


def dynamo_disabled(hook: _F, reason: str = "fsdp2 hooks run outside of the graph") -> _F:
    """``hook``, which the compiler neither traces nor compiles; with ``fullgraph`` its error says ``reason``.

    Costs one comparison while no compiled code is around. The compiler's own wrapper is made, and the compiler
    imported, at the first call under it: making it at each call costs a tenth of upstream's host time.
    """
    if not _CAN_SKIP_FRAMES:
        disabled: Any = torch.compiler.disable
        return disabled(hook, recursive=True, reason=reason)  # type: ignore[no-any-return]
    guarded: list[Callable[..., Any]] = []

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _get_eval_frame_callback() is None:
            return hook(*args, **kwargs)
        if not guarded:
            disable: Any = torch._dynamo.disable
            guarded.append(disable(hook, recursive=True, reason=reason))
        return guarded[0](*args, **kwargs)

    # As a frame, too: not compiled when code that the compiler runs calls it.
    _set_code_exec_strategy(run.__code__, _SKIP)  # type: ignore[attr-defined]
    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # read by the tracer
    run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    run._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    run._torchdynamo_orig_callable = hook  # type: ignore[attr-defined]
    run._guarded = guarded  # type: ignore[attr-defined]  # read by ``has_met_compiler``
    return run  # type: ignore[return-value]


def dynamo_skips(function: _F) -> _F:
    """Let the compiler leave the frames of ``function`` alone, and compile what it calls."""
    if _CAN_SKIP_FRAMES:
        _set_code_exec_strategy(function.__code__, _SKIP)
    return function


def keep_hooks_outside(module: nn.Module) -> None:
    """Let ``module``, if it is compiled in place, run its hooks outside of the graph.

    torch 2.14 puts a function around the call of a module of its own, so that the compiler traces the hooks, too, and
    breaks the graph at each: the compiler skips that function, and compiles the forward that it leads to.
    """
    around = getattr(module._compiled_call_impl, "_torchdynamo_orig_callable", None)
    if isinstance(around, types.FunctionType):
        around.__code__ = around.__code__.replace()  # not that of all functions of this kind
        dynamo_skips(around)


# --- the compiler, seen from code that it runs; what captures graphs is in ``compiled/torch_compat.py`` ---------------


def is_tracing() -> bool:
    """Whether the compiler traces the caller; a constant to it."""
    return torch.compiler.is_compiling()


def has_met_compiler(hook: Callable[..., Any]) -> bool:
    """Whether code that the compiler runs has called ``hook``, a ``dynamo_disabled`` function."""
    return bool(getattr(hook, "_guarded", ()))


def compiled_modules(root: nn.Module) -> list[nn.Module]:
    """The modules below ``root`` that ``module.compile()`` or ``torch.compile`` was called on, parents first."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return []
    found = [
        each
        for each in root.modules()
        if isinstance(each, compiler.OptimizedModule) or each._compiled_call_impl is not None
    ]
    return [each._orig_mod if isinstance(each, compiler.OptimizedModule) else each for each in found]


# --- how other libraries recognize a sharded module -------------------------------------------------------------------


def applied_apis(module: nn.Module) -> list[str]:
    """Names of the composable APIs applied to ``module``: "fully_shard", "replicate", ..."""
    return list(module.__dict__.get(_REGISTRY_KEY) or ())  # not getattr: a wrapper's leads to the module that it wraps


class ModuleStateBase(_State):
    """Base of our per-module state, so that torch's look-ups by type find it.

    Pipeline schedules use private names of FSDP2's state to reduce what their micro-batches accumulated: first each
    group, and we show none, then at the end of backward.
    """

    _state_ctx = types.SimpleNamespace(all_states=())

    def reduce_accumulated(self) -> None:
        """Do what the end of a backward with gradient sync does."""
        raise NotImplementedError

    def shared_context(self) -> object:
        """The same for roots that share their communication."""
        raise NotImplementedError

    @property
    def _comm_ctx(self) -> object:
        return self.shared_context()

    def _root_post_backward_final_callback(self) -> None:
        self.reduce_accumulated()


_STATE_OWNER = inspect.unwrap(_torch_fsdp2.fully_shard)
"""The key under which torch's ``fully_shard.state`` looks up a module's state: the function inside torch's decorator.

Read here, once: other libraries replace ``torch.distributed.fsdp.fully_shard``, and some don't tell what they wrap.
"""


def register_module_state(module: nn.Module, state: ModuleStateBase) -> None:
    """Make ``state`` what ``torch.distributed.fsdp.fully_shard.state(module)`` and torch's registries report."""
    registry = module.__dict__.setdefault(_REGISTRY_KEY, {})
    registry["fully_shard"] = _RegistryItem()
    states = module.__dict__.setdefault(_STATE_KEY, {})
    states[_STATE_OWNER] = state
    _insert_module_state(module, state)


@contextlib.contextmanager
def without_module_state(module: nn.Module) -> Iterator[None]:
    """Inside, ``module.__dict__`` has nothing of what ``register_module_state`` put there."""
    places = [
        (module.__dict__[_REGISTRY_KEY], "fully_shard"),
        (module.__dict__[_STATE_KEY], _STATE_OWNER),
    ]
    kept = [place.pop(key) for place, key in places]
    try:
        yield
    finally:
        for (place, key), value in zip(places, kept, strict=True):
            place[key] = value


def torch_mixin() -> type:
    """torch's FSDPModule, or the subclass that somebody has put where torch's ``fully_shard`` looks it up."""
    there: Any = _torch_fsdp2.FSDPModule
    return there if isinstance(there, type) and issubclass(there, TorchFSDPModule) else TorchFSDPModule


def let_guard_pickler_find(cls: type, new: type) -> None:
    """Enter ``new`` as the FSDP class of ``cls`` if guards are pickled (``torch._dynamo.config.caching_precompile``).

    Not otherwise: torch's own fully_shard takes its classes from the same map, and would give its modules our methods.
    """
    config = sys.modules.get("torch._dynamo.config")
    wanted = config.caching_precompile if config is not None else os.environ.get("TORCH_CACHING_PRECOMPILE") == "1"
    if wanted:
        _torch_fsdp2.cls_to_fsdp_cls.setdefault(cls, new)


def module_state(module: nn.Module) -> ModuleStateBase | None:
    """The state that ``register_module_state`` stored, or None."""
    state = module.__dict__.get(_STATE_KEY)
    if state is None:
        return None
    found = state.get(_STATE_OWNER)
    return found if isinstance(found, ModuleStateBase) else None


def torch_fsdp2_state(module: nn.Module) -> Any:
    """The state that torch's own ``fully_shard`` has put on a module, or None."""
    state = _get_module_state(module)
    return state if isinstance(state, _TorchFSDPState) else None
