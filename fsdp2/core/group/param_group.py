"""Parameters that are gathered and reduced together: their memory, gradients, and units that hold them unsharded.

A group belongs to one unit. If one of its parameters is tied to a module of another unit, that unit *borrows* the
group, which then stays unsharded from the first of its holders to the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ..plan.mesh import DataParallelMesh
from .gradients import Gradients
from .memory import GroupMemory
from .options import GroupOptions
from .param import ShardedParam


class ParamGroup(GroupMemory):
    """Parameters that are gathered and reduced together.

    holders: units that hold the group unsharded, if several may; None if only one unit uses it
    """

    def __init__(
        self, params: Sequence[ShardedParam], mesh: DataParallelMesh, device: torch.device, options: GroupOptions
    ) -> None:
        self.gradients = Gradients(self)  # first, because planning needs it
        super().__init__(params, mesh, device, options)
        self.holders: set[Hashable] | None = None

    def rebuild(self) -> None:
        super().rebuild()
        self.gradients.choose_leaf_dtypes()

    def reshard_for_all(self) -> None:
        """Reshard, even if units hold the group."""
        if self.holders:
            self.holders.clear()
        self.take_over_toggles()
        self.reshard()

    def discard_gradients(self) -> None:
        """Forget gradients that have not reached sharded parameters, and units that held the group for a backward."""
        self.gradients.discard()
        if self.holders:
            self.holders.clear()
