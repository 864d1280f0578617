"""Before ranks compare what they saw, they see over the store whether all have come: a collective that some ranks never reach aborts.

Worked example, ``if rank == 0: optimizer.step()`` on two ranks: rank 0 comes to the first step, and asks who else has. Rank 1 has not,
and has begun its second forward, while rank 0 has begun one: it will not come. Rank 0 learns so at once, and starts no collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from ..torch_names import torch_collectives

PATIENCE_S = 600.0
"""Seconds after which a rank that gives no sign is taken for one that does not come; compiling a model may take minutes."""

_num_made = 0  # equal on all ranks: each meeting has keys of its own


class Meeting:
    """The meetings of one watch. All ranks make it at the same place."""

    def __init__(self) -> None:
        global _num_made
        _num_made += 1
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._store: Any = torch_collectives.keys_of_the_store(f"fsdp2_doctor_{_num_made}") if self._num_ranks > 1 else None
        try:
            self._read("come", self._rank)
        except RuntimeError:  # a store that keeps nothing, of pretended ranks
            self._store = None
        self._num_forwards = self._num_held = 0
        self.absent: tuple[int, ...] = ()

    def begin_forward(self) -> None:
        """This rank begins a forward of a step that ends in a meeting. Collective: no"""
        self._num_forwards += 1
        self._write("forward", self._num_forwards)

    def leave(self) -> None:
        """This rank comes to no other meeting."""
        self._write("forward", 1 << 30)

    def hold(self, peers: Collection[int]) -> bool:
        """Wait until all ranks have come. A collective of all ranks must follow where it returns True.

        peers:   the ranks that run the same forwards as this one
        Returns: False if some, ``absent``, will not come: the rank may then communicate with no other, now or later
        """
        if self._store is None or self.absent:
            return not self.absent
        self._num_held += 1
        self._write("come", self._num_held)
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        begun, pause = time.monotonic(), 0.0005
        while others := [rank for rank in others if self._read("come", rank) < self._num_held]:
            gone = tuple(rank for rank in others if rank in peers and self._read("forward", rank) > self._num_forwards)
            if gone or time.monotonic() - begun > PATIENCE_S:
                self.absent = gone or tuple(others)
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return True

    def _write(self, key: str, number: int) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, with the process group
                self._store.set(f"{key}/{self._rank}", str(number))

    def _read(self, key: str, rank: int) -> int:
        name = f"{key}/{rank}"
        return int(self._store.get(name)) if self._store is not None and self._store.check([name]) else 0
