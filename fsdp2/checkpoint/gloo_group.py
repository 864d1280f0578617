"""A gloo process group over the ranks of another, for a thread that communicates while training does.

Groups are given back and lent again, not destroyed: a process group costs five files and three threads as long as the process lives.
"""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..core import torch_compat as compat
from ..core.comm.agreement import is_lost
from ..core.comm.process_groups import another_over
from ..errors import OrderError

_Key = tuple[tuple[int, ...], timedelta | None]

_free: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, list[dist.ProcessGroup]]] = WeakKeyDictionary()
"""Groups that no thread uses, by the default group, which ends with ``destroy_process_group()``, and by ranks and time-out."""


def borrow_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group over the ranks of ``process_group`` (None: all), with its time-out, for the caller alone. Collective: yes, over these."""
    if not dist.is_initialized():
        raise OrderError(
            "there is no process group",
            expected="torch.distributed to be initialised, for one rank as for many",
            fix="call torch.distributed.init_process_group before",
        )
    free = _free_for(process_group)
    return free.pop() if free else another_over(_over(process_group), "checkpointer", backend="gloo")


def give_back(group: dist.ProcessGroup, process_group: dist.ProcessGroup | None) -> None:
    """Give it back, on all its ranks alike, with nothing under way in it. If a rank of it is gone, it is not lent again."""
    if dist.is_initialized() and not is_lost(group):
        _free_for(process_group).append(group)


def _free_for(process_group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    over = _over(process_group)
    key = tuple(dist.get_process_group_ranks(over)), compat.timeout_of_group(over)
    return _free.setdefault(_over(None), {}).setdefault(key, [])


def _over(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    over = process_group or dist.group.WORLD
    assert over is not None
    return over
