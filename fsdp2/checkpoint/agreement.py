"""One collective after which every rank goes on, or every rank raises the same error.

Worked example: rank 2 of 4 finds the disk full. It calls ``agree(group, error)``, the others ``agree(group, None)``; all four raise
rank 2's CheckpointError.
"""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from ..errors import FSDPError

T = TypeVar("T")


def default_group() -> dist.ProcessGroup | None:
    """All ranks; None if there is but this one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def agree(process_group: dist.ProcessGroup | None, problem: FSDPError | None, said: T) -> list[T]:
    """What every rank says, by rank of the group. Collective: yes.

    Raises: the problem of the lowest rank that has one, on every rank
    """
    everyone: list[tuple[FSDPError | None, T]] = [(problem, said)]
    if process_group is not None:
        everyone *= process_group.size()
        dist.all_gather_object(everyone, (problem, said), group=process_group)
    problems = [each for each, _ in everyone if each is not None]
    if problems:
        raise problem if problem is not None and str(problem) == str(problems[0]) else problems[0]
    return [each for _, each in everyone]
