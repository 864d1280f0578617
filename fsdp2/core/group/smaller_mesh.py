"""Between forward and backward: a group's parameters sharded over a smaller mesh (``reshard_after_forward=<int>``).

Each rank keeps a larger shard, so backward gathers among few neighboring ranks. The shards live in a flat buffer of
their own, in the compute dtype, from ``keep_shards`` to the end of the next unshard.

Worked example: an (8, 4) parameter over 4 ranks, reshard_after_forward=2: rank 3 keeps rows [4, 8) from forward to
backward, and gathers with rank 2 only; after backward it keeps rows [6, 8) again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...policy import AllGather
from ...torch_names import torch_dtensors
from ..plan.layout import group_layout
from ..plan.mesh import DataParallelMesh
from .all_gather import Gather, Gathering
from .group_plan import GroupPlan
from .param import ShardedParam, mark, own_shard, shard_view, sum_of_bits, whole_local


class SmallerShards:
    """A group's shards over ``mesh``, smaller than the group's; made while the unsharded storage is allocated."""

    def __init__(
        self, mesh: DataParallelMesh, plan: GroupPlan, storage: torch.UntypedStorage, comm: AllGather | None
    ) -> None:
        """storage: of the unsharded parameters"""
        self.mesh = mesh
        self._params = plan.params
        self._streams = plan.streams
        self._specs = [param.spec.over(param.fqn, mesh, plan.param_dtype) for param in plan.params]
        self._layout = group_layout([spec.cut for spec in self._specs], num_shards=mesh.shard_size, align=plan.align)
        assert mesh.shard_group is not None
        self._gather = Gather(plan, storage, mesh.shard_group, comm, smaller=self._layout)
        self._flat: Tensor | None = None
        self.shown: list[nn.Parameter] = []  # the last result of ``keep_shards``
        self._version = 0  # of ``shown``, as ``keep_shards`` left it
        self._sums: list[tuple[int, int]] = []

    def storages(self) -> list[torch.UntypedStorage]:
        """The storage of this rank's flat buffer, while it holds shards."""
        return [] if self._flat is None else [self._flat.untyped_storage()]

    def keep_shards(self) -> None:
        """Copy this rank's shards out of the unsharded parameters: DTensors in ``shown``, in the group's order."""
        first = self._params[0].unsharded
        assert first is not None
        flat = torch.zeros(self._layout.shard_numel, dtype=first.dtype, device=first.device)
        shown = []
        for param, spec, slot in zip(self._params, self._specs, self._layout.slots, strict=True):
            local = shard_view(flat, slot, spec, self.mesh.shard_rank)
            local.copy_(spec.to_logical(own_shard(whole_local(param), spec, self.mesh.shard_rank)))
            shown.append(
                nn.Parameter(torch_dtensors.new_dtensor(local, spec.sharded), requires_grad=param.sharded.requires_grad)
            )
            mark(shown[-1], param)
            if param.adds_up_in is not None:
                shown[-1].grad_dtype = param.sharded.grad_dtype
        self._flat, self.shown = flat, shown  # last: there may be no memory for the copies
        self._version = self._version_of_shown()
        self._sums = self._sums_of_bits() if self._streams.host_waits else []

    def num_writes(self) -> int:
        """How often the user has written ``shown`` in place since ``keep_shards``."""
        return self._version_of_shown() - self._version

    def _version_of_shown(self) -> int:
        return sum([each._version for each in (*self.shown, *self._locals())])

    def _locals(self) -> list[Tensor]:
        return [torch_dtensors.local_tensor(each) for each in self.shown]  # type: ignore[arg-type]

    def written_unseen(self) -> list[ShardedParam]:
        """Parameters whose shard, or whose shard over the smaller mesh, is not what it was at ``keep_shards``.

        The two may have no row in common, so neither shows what was written to the other. On the host only.
        """
        if not self._sums:
            return []
        compared = zip(self._params, self._sums, self._sums_of_bits(), strict=True)
        return [param for param, was, now in compared if was != now]

    def _sums_of_bits(self) -> list[tuple[int, int]]:
        both = zip(self._params, self._locals(), strict=True)
        return [(sum_of_bits(param.local), sum_of_bits(local)) for param, local in both]

    def start(self, together: list[Gathering] | None = None) -> Gathering:
        """Start gathering over the smaller mesh; see ``Gather.start``. Collective: yes, over its shard axis."""
        return self._gather.start(self._flat, False, together)

    def drop(self) -> None:
        self._flat = None
        self.shown = []
        self._gather.forget()
