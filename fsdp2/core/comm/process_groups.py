"""A second process group over the ranks of another, so that the collectives of the two need not wait for each other.

Note: torch names a group made with ``use_local_synchronization`` by its ranks and by how many groups the process has. Ranks that count
differently wait for each other under different names, for ever; so they compare their counts first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...errors import OrderError, message
from .. import torch_compat as compat


def another_over(process_group: dist.ProcessGroup, device: torch.device, name: str) -> dist.ProcessGroup:
    """A new process group over the ranks of ``process_group``. Collective: yes, over these.

    device: which ``process_group`` communicates on
    name:   what tools show as its description
    Raises: OrderError on all of these ranks, if they have made different numbers of process groups before
    """
    ranks = dist.get_process_group_ranks(process_group)
    own = torch.tensor([compat.num_process_groups()], device=device)
    gathered = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(gathered, own, group=process_group)
    counts = torch.cat(gathered).tolist()
    if len(set(counts)) > 1:
        raise OrderError(
            message(
                f"a process group for {name} cannot be made: its ranks have made different numbers of process groups before",
                items=[f"rank {rank}: {count} process groups" for rank, count in zip(ranks, counts, strict=True)],
                expected="the same number on each, for torch makes the name of the next of it, under which ranks find each other",
                fix="make every process group on all ranks alike (new_group without use_local_synchronization does)",
            )
        )
    made = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"fsdp2_{name}")
    assert isinstance(made, dist.ProcessGroup)
    return made
