"""A process group of our own over the ranks of another, so that the collectives of the two need not wait for each other.

Note: torch names a process group by how many groups the process has made, or by its ranks and that number, and ranks find each
other under the name. So ranks that have made different numbers of groups wait for each other under different names, for ever; and
from torch 2.14 on, a group of some ranks shifts the numbers of these ranks for all later groups (before, for later groups of some
ranks). Our group has a name that its ranks agree on, and leaves torch's counts as they were: it neither depends on the groups that were
made before, nor changes those that are made later. How users' own groups affect each other is up to torch.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from .. import torch_compat as compat
from .collective_log import during


def another_over(process_group: dist.ProcessGroup, name: str, backend: str | None = None) -> dist.ProcessGroup:
    """A new process group over the ranks of ``process_group``, with its time-out. Collective: yes, over these.

    name:    what tools show as its description
    backend: None: that of the default group
    """
    ranks = dist.get_process_group_ranks(process_group)
    drawn = torch.tensor([int.from_bytes(os.urandom(7), "big")], device=compat.device_of_group(process_group))
    with during("agreement of ranks", process_group, drawn):
        dist.broadcast(drawn, src=ranks[0], group=process_group)
    timeout = compat.timeout_of_group(process_group)
    return compat.new_named_group(ranks, backend, f"fsdp2_{name}", f"fsdp2_{name}_{drawn.item():x}", timeout)
