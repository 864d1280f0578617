"""What a program, or its environment, has asked to run until its end: the watchdog, and the lookout that answers for this rank.

FSDP2_WATCHDOG=600 torchrun --nproc-per-node 2 train.py      every rank is inside of fsdp2.watchdog(600), from its first fully_shard on
"""

from __future__ import annotations

import os

import torch.distributed as dist

from ..errors import ArgumentError, short
from . import lookout

VARIABLE = "FSDP2_WATCHDOG"

_watching = False


def watch_if_asked() -> None:
    """Start what is asked for, once a process group of several ranks exists. Collective: no. Raises: ArgumentError"""
    global _watching
    if lookout.Limits.asked:  # so that this rank answers from now on
        lookout.start()
    given = os.environ.get(VARIABLE)
    if not given or _watching or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    from .watcher import watchdog  # with its modules; most programs need none of them

    try:
        timeout = float(given)
    except ValueError:
        raise ArgumentError(
            f"the environment has {VARIABLE}={short(given)}", expected="a number of seconds", fix=f"for instance {VARIABLE}=600"
        ) from None
    _watching = True
    watchdog(timeout)
