"""Collectives, process groups, their store and symmetric memory, under the names that each version of torch has.

Collectives are looked up on ``torch.distributed`` when they are called, so that tools which patch or count them see ours.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_IS_NEW = hasattr(dist, "all_gather_single")  # torch 2.13; it deprecates the older names
ALL_GATHER = "all_gather_single" if _IS_NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _IS_NEW else "reduce_scatter_tensor"
"""Names on ``torch.distributed``: in each step the core saves the call of a function here."""


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
    return getattr(dist, ALL_GATHER)(output, input, group=group, async_op=async_op)  # type: ignore[no-any-return]


def reduce_scatter_single(output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
    return getattr(dist, REDUCE_SCATTER)(output, input, op=op, group=group, async_op=async_op)  # type: ignore[no-any-return]


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


def new_named_group(ranks: list[int], backend: str | None, description: str, name: str, timeout: timedelta | None) -> dist.ProcessGroup:
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
