"""A group's unsharded side: the storage of its unsharded parameters, what fills it, and how it is freed.

The unsharded parameters are made once over one storage, whose *object* is never freed: autograd's saved views alias it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...policy import AllGather
from ..comm.streams import Stream
from ..plan.mesh import DataParallelMesh
from .all_gather import Gather, LocalGather
from .extension_gather import ExtensionGather
from .group_plan import GroupPlan
from .param import new_unsharded_param, storage_view
from .smaller_mesh import SmallerShards


class Unsharded:
    """Made at the first unshard, when the parameters have their values; dropped when the group is planned again.

    gather:       fills the storage
    storage:      of the unsharded parameters; None where extensions make them
    extensions:   the gather, if they do: ``fill`` then gives the parameters the values of a gather that has finished
    smaller:      the shards over the smaller mesh, once the group has had some
    written_at:   the group's ``written_at`` at the last unshard
    shares:       the storage is the flat shard's, and is never freed
    freed_nbytes: size of the storage while allocated; 0 for extensions and fake tensors
    allocated_on: the stream that was compute then
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, plan: GroupPlan, flat: Tensor | None, comm: AllGather | None) -> None:
        """flat: this rank's shards, unless they have memory of their own; comm: a custom communicator."""
        mesh, device, options = plan.mesh, plan.device, plan.options
        self._plan = plan
        self._comm = comm
        self.allocated_on: Stream = plan.streams.compute
        self.storage: torch.UntypedStorage | None = None
        self.smaller: SmallerShards | None = None
        self.written_at = -1
        self.gather: Gather | LocalGather | ExtensionGather
        self.extensions: ExtensionGather | None = None
        self.shares = False
        self.freed_nbytes = 0
        if plan.has_own_memory:
            self.gather = self.extensions = ExtensionGather(plan, comm if mesh.shard_size > 1 else None)
            return
        assert flat is not None
        self.freed_nbytes = plan.unsharded_nbytes if type(flat) is Tensor else 0
        self.shares = mesh.shard_size == 1 and plan.param_dtype is plan.dtype and not options.offload
        if self.shares:  # one rank keeps all of the parameters, in the dtype that they are computed with
            self.storage = flat.untyped_storage()
        else:
            self.storage = torch.empty(plan.unsharded_nbytes, dtype=torch.uint8, device=device).untyped_storage()
        like = torch.empty(0, dtype=plan.param_dtype, device=device)
        for param, slot in zip(plan.params, plan.layout.slots, strict=True):
            view = storage_view(self.storage, like, slot.unsharded_offset, slot.cut.shape)
            param.unsharded = new_unsharded_param(param, param.spec.to_logical(view))
        if mesh.shard_group is None or mesh.shard_size == 1:
            self.gather = LocalGather(plan, self.storage, self.shares)
        else:
            self.gather = Gather(plan, self.storage, mesh.shard_group, comm)
        self.free()

    def cut_for(self, mesh: DataParallelMesh) -> SmallerShards:
        """Keep shards of the unsharded parameters over ``mesh``, the smaller one."""
        if self.smaller is None or self.smaller.mesh is not mesh:
            assert self.storage is not None
            self.smaller = SmallerShards(mesh, self._plan, self.storage, self._comm)
        self.smaller.keep_shards()
        return self.smaller

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages of unsharded parameters, or of shards over the smaller mesh; not those of extensions."""
        own = [] if self.storage is None else [self.storage]
        return own if self.smaller is None else own + self.smaller.storages()

    def free(self) -> None:
        """Free the memory, and keep the parameters.

        It goes back to the stream that allocated it: a side stream of the user's, if ``unshard`` ran there.
        """
        streams = self._plan.streams
        if self.shares:
            return
        if self.storage is None:
            assert self.extensions is not None
            self.extensions.free()
            return
        if self.allocated_on != streams.compute:
            streams.order(self.allocated_on, streams.mark(streams.compute))
        streams.resize(self.storage, 0)
