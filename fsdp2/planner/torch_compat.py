"""The private torch names that the planner needs, each with its reason. This file refuses to know fsdp2."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode  # private module, and the only place of both
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]

GLOO_STAND_IN = "fake_gloo"
ASKS_DEVICE = torch.ops.prim.device.default
"""The operator by which a program asks a fake tensor for its device."""
_c10d: Any = dist.distributed_c10d
_numbers = itertools.count(1)
_MAPS = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


@contextlib.contextmanager
def world_of_its_own(backend: str, world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``world_size`` that do not exist; process groups from outside are out of sight, and unharmed.

    backend: "fake", which torch has, or GLOO_STAND_IN: the same under another name
    """
    import torch.testing._internal.distributed.fake_pg as fake_pg  # registers "fake"; private: there is no public way to it

    if backend == GLOO_STAND_IN and not hasattr(dist.Backend, GLOO_STAND_IN.upper()):
        create: Any = fake_pg._create_fake_pg
        dist.Backend.register_backend(GLOO_STAND_IN, create, extended_api=True, devices=["cpu"])
    # torch keeps its process groups in globals of one module; ``destroy_process_group`` would drop the names of those outside as well.
    world = _c10d._world
    kept = {name: getattr(_c10d, name) for name in (*_MAPS, "_group_count", "_default_pg_init_method")}
    default, coalescing = world.default_pg, world._pg_coalesce_state
    number = next(_numbers)
    for name in _MAPS:
        setattr(_c10d, name, {})
    _c10d._group_count = number * 1_000_000  # names of process groups are counted, and unique in a process
    world.default_pg, world._pg_coalesce_state = None, {}
    try:
        dist.init_process_group(backend, rank=0, world_size=world_size, store=fake_pg.FakeStore(), group_name=f"fsdp2_plan_{number}")
        yield
    finally:
        for name in set(_c10d._pg_names.values()):
            torch._C._distributed_c10d._unregister_process_group(name)
        for name, value in kept.items():
            setattr(_c10d, name, value)
        world.default_pg, world._pg_coalesce_state = default, coalescing


def is_inside_fake_mode() -> bool:
    """Whether somebody else, DTensor's sharding propagation for one, is running operators for their shapes alone."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


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


def name_of_operator(func: Any) -> str:
    """``aten::mm``, without the overload."""
    return str(func._schema.name)


def roles_of_arguments(func: Any) -> tuple[list[tuple[str, bool]], list[bool]]:
    """By the schema: each argument's name, and whether it is written; of each result, whether it is a view of an argument."""
    schema = func._schema
    arguments = [(each.name, each.alias_info is not None and each.alias_info.is_write) for each in schema.arguments]
    views = [each.alias_info is not None and not each.alias_info.is_write for each in schema.returns]
    return arguments, views


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
