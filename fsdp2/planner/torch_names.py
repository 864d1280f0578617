"""The private torch names that the planner needs, each with its reason."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode  # private module, and the only place of both
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]

GLOO_STAND_IN = "fake_gloo"
READS_NUMBER = torch.ops.aten._local_scalar_dense.default
GROUPED_PRODUCT = getattr(torch.ops.aten, "_grouped_mm", None)
ASKS_DEVICE = torch.ops.prim.device.default
"""The operator by which a program asks a fake tensor for its device."""
_c10d: Any = dist.distributed_c10d
_numbers = itertools.count(1)
_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
_one_at_a_time = threading.RLock()


class _WorldOfThread:
    """torch's record of process groups: for one thread ``own``, for all others ``outside``."""

    def __init__(self, outside: Any, own: Any) -> None:
        self.__dict__.update(_outside=outside, _own=own, _thread=threading.get_ident())

    def _mine(self) -> Any:
        return self._own if threading.get_ident() == self._thread else self._outside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)


@contextlib.contextmanager
def world_of_its_own(backend: str, world_size: int) -> Iterator[None]:
    """Inside, this thread is rank 0 of ``world_size`` that do not exist. Only other threads see process groups from outside.

    A second thread waits here until the first one has left.
    backend: "fake", which torch has, or GLOO_STAND_IN: the same under another name
    """
    import torch.testing._internal.distributed.fake_pg as fake_pg  # registers "fake"; private: there is no public way to it

    with _one_at_a_time:
        if backend == GLOO_STAND_IN and not hasattr(dist.Backend, GLOO_STAND_IN.upper()):
            create: Any = fake_pg._create_fake_pg
            dist.Backend.register_backend(GLOO_STAND_IN, create, extended_api=True, devices=["cpu"])
        number = next(_numbers)
        outside = _c10d._world
        own = type("World", (type(outside),), {name: {} for name in _MAPS} | {"group_count": 0})()
        own.group_count = number * 1_000_000  # names of process groups are counted, and unique in a process
        # What else torch keeps of the default process group, it keeps in globals that ``init_process_group`` sets.
        kept = {name: getattr(_c10d, name) for name in ("_backend", "_default_pg_init_method") if hasattr(_c10d, name)}
        excepthook, rank = sys.excepthook, dist.get_rank() if dist.is_initialized() else -1
        _c10d._world = _WorldOfThread(outside, own)
        try:
            store = fake_pg.FakeStore()
            dist.init_process_group(backend, rank=0, world_size=world_size, store=store, group_name=f"fsdp2_plan_{number}")
            yield
        finally:
            _c10d._world = outside
            for name in set(own.pg_names.values()):
                torch._C._distributed_c10d._unregister_process_group(name)
            for name, value in kept.items():
                setattr(_c10d, name, value)
            sys.excepthook = excepthook
            torch._C._distributed_c10d._set_global_rank(rank)


def is_inside_fake_mode() -> bool:
    """Whether somebody else, DTensor's sharding propagation for one, is running operators for their shapes alone."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def views_of(mode: FakeTensorMode, func: Any, base: FakeTensor, args: Any, kwargs: Any) -> Any:
    """What ``func``, which only makes views of its first argument ``base``, returns: as inside ``mode``, in a fifth of the time."""
    with in_kernel_invocation_manager(mode):
        made = func(*args, **kwargs)
    if isinstance(made, Tensor):
        return FakeTensor(mode, made, base.fake_device)
    return [FakeTensor(mode, each, base.fake_device) for each in made]


def sequence_number() -> int:
    """The number of the next node that autograd records on this thread: nodes are numbered as forward makes them."""
    autograd: Any = torch.autograd
    return int(autograd._get_sequence_nr())


def number_of_running_node() -> int | None:
    """The sequence number of the node whose backward runs; None outside of one."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def reads_values(error: Exception) -> bool:
    """Whether it is what fake tensors raise where a result depends on values that they do not have."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def writes(func: Any) -> bool:
    """Whether the operator writes to an argument."""
    return bool(func._schema.is_mutable)


def is_undetermined(func: Any) -> bool:
    """Whether the values of an operator's results do not follow from its arguments: those of random ones, and of memory as it is."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """The result of ``torch._grouped_mm`` for the dtypes that it takes and its meta kernel does not: all but bf16."""
    if a.ndim == 2 and b.ndim == 2:
        assert offsets is not None
        return a.new_empty(offsets.shape[0], a.shape[0], b.shape[1])
    if a.ndim == 3 and b.ndim == 3:
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(a.shape[-2], b.shape[-1])


@contextlib.contextmanager
def fake_tensors_in_their_place() -> Iterator[None]:
    """Inside, transformers does not take this thread's fake tensors for a graph that is traced, for which its models run other code;
    and torch does not log the traceback of what an operator says of its arguments, which is raised as well.
    """
    thread = threading.get_ident()
    log = logging.getLogger(FakeTensor.__module__)

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    utilities = sys.modules.get("transformers.utils.import_utils")
    with contextlib.ExitStack() as stack:
        if hasattr(utilities, "is_fake_tensor"):
            stack.enter_context(on_this_thread(utilities, "is_fake_tensor", lambda tensor: False))
        log.addFilter(is_of_others)
        stack.callback(log.removeFilter, is_of_others)
        yield


@contextlib.contextmanager
def on_this_thread(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside, this thread calls ``replacement`` where all others call the function ``name`` of ``owner``."""
    original, thread = getattr(owner, name), threading.get_ident()

    def function(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    with replaced(owner, name, function):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside, ``name`` of ``owner`` is ``replacement``."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def name_of_operator(func: Any) -> str:
    """``aten::mm``, without the overload."""
    return str(func._schema.name)


def roles_of_arguments(func: Any) -> tuple[list[tuple[str, bool]], list[bool]]:
    """By the schema: each argument's name, and whether it is written; of each result, whether it is a view of an argument."""
    schema = func._schema
    arguments = [(each.name, each.alias_info is not None and each.alias_info.is_write) for each in schema.arguments]
    views = [each.alias_info is not None and not each.alias_info.is_write for each in schema.returns]
    return arguments, views
