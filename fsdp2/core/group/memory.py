"""The memory of the parameters that travel together: unshard and reshard.

A group owns one flat shard, of which its sharded parameters are views, and one storage, of which its unsharded parameters are views.
``issue`` starts an all-gather into that storage, ``wait`` makes its result usable and shows the unsharded parameters to the
modules, ``reshard`` shows the sharded ones again and frees the storage (never the storage *object*: autograd's saved views alias
it). All parameters of a group have one storage dtype, one compute dtype, one mesh. It refuses to know when it is used, gradients,
and the user's modules (its ``Registry`` shows parameters to them).

Note: leases. The flat shard is read by an all-gather from ``issue`` to its completion; a write in between would be seen by the
other ranks (measured: 99 % of the elements). So whoever lets the user write (end of backward, state dict hooks, ``_apply``, ...)
first calls ``release`` on every group with a gather under way, and ``issue(copy=True)`` sends a copy where the user may write
before the wait. The unsharded storage is leased for writing over the same time: ``reshard`` of a pending gather waits first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ParameterError, meta_error
from ...policy import AllGather
from ..comm import collectives
from ..comm.streams import Event, Stream, streams_of
from ..plan.layout import GroupLayout, gather_plan, group_layout
from ..plan.mesh import DataParallelMesh
from ..plan.placement import in_dtype
from .all_gather import Gather, GatherPlace, LocalGather
from .custom_all_gather import CommGather
from .extensions import ExtensionGather
from .own_memory import has_extension, needs_own_memory
from .param import Owner, ShardedParam, new_unsharded_param, shard_view, storage_view
from .smaller_mesh import PostForward
from .step_count import OPTIMIZER_STEPS

ALIGN_NBYTES = 128
"""Every view of a flat buffer starts at a multiple of this: kernels and collectives leave their fast paths otherwise."""

DIRECT_FROM_NBYTES = 1 << 20
"""Parameters from this size on are gathered straight into place, where the backend gains by it."""


@dataclass(frozen=True)
class GroupOptions:
    """How a group runs; the last four are private, for tests and benchmarks: measurement picks their defaults.

    mp_policy:            as the user gave it, for all-gather extensions
    offload, pin_memory:  keep the flat shard in (page-locked) host memory
    gather:               "auto", "direct", "packed" or "mixed"
    all_gather, reduce_scatter, all_reduce: the collective algorithm; None lets ``collectives`` choose
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    pin_memory: bool = False
    mp_policy: Any = None
    gather: str = "auto"
    all_gather: collectives.AllGatherAlgorithm | None = None
    reduce_scatter: collectives.ReduceScatterAlgorithm | None = None
    all_reduce: collectives.AllReduceAlgorithm | None = None


class Registry(Protocol):
    """Shows a group's parameters to the user's modules."""

    def show_sharded(self) -> None: ...

    def show_unsharded(self) -> None: ...

    def show(self, shown: Sequence[nn.Parameter]) -> None:
        """Show ``shown``, in the order of the group's parameters."""

    def add_owner(self, param: ShardedParam, owner: Owner) -> None: ...

    def verify(self) -> bool:
        """Whether each sharded parameter still is where the group put it and keeps its data there; adopts replaced ones."""


class GroupState(Enum):
    """What a group's parameters are.

    HIDDEN:     unsharded, while the modules show the sharded ones
    RESHARDED:  sharded over the smaller mesh of ``reshard_after_forward=<int>``
    """

    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()
    HIDDEN = auto()
    RESHARDED = auto()


class GroupMemory:
    """Parameters that are all-gathered together."""

    def __init__(self, params: Sequence[ShardedParam], mesh: DataParallelMesh, device: torch.device, options: GroupOptions) -> None:
        self.params = list(params)
        self.mesh = mesh
        self.device = device
        self.options = options
        self.streams = streams_of(device)
        self.state = GroupState.SHARDED
        self.fqn = ""  # of the module that fully_shard was called on, from the root
        self.registry: Registry  # set by whoever touches the modules, before the first unshard
        self.all_gather_comm: AllGather | None = None  # a custom communicator
        self.flat: Tensor | None = None  # None on the meta device, and where parameters have memory of their own
        self._host_read: Event = None  # behind the last copy of an offloaded flat shard to the device
        self._free: Callable[[], None]  # frees the unsharded memory; set with ``gather``
        self._allocated_on: Stream = None  # the stream that was compute at the last ``issue``
        self.smaller: DataParallelMesh | None = None  # for ``reshard_after_forward=<int>``
        self.post_forward: PostForward | None = None
        self._steps = 0  # optimizer steps before the last unshard
        self.rebuild()

    # --- the plan ---

    @torch.inference_mode(False)
    def rebuild(self) -> None:
        """Plan again for the parameters as they are now and move them into a new flat shard; they keep their identity.

        Memory: one flat shard more than the parameters as they are now.
        """
        assert self.state is GroupState.SHARDED
        self._refuse_mixed_dtypes()
        self.dtype = self.params[0].dtype
        for param in self.params:
            if param.spec.sharded.tensor_meta is None or param.spec.sharded.tensor_meta.dtype is not self.dtype:
                param.spec = replace(param.spec, sharded=in_dtype(param.spec.sharded, self.dtype))
        wanted = self.options.param_dtype
        self.param_dtype = wanted if wanted is not None and self.dtype.is_floating_point else self.dtype
        self.reduce_dtype = self.options.reduce_dtype or self.param_dtype
        itemsize = min(dtype.itemsize for dtype in (self.dtype, self.param_dtype, self.reduce_dtype))
        self.align = max(ALIGN_NBYTES // itemsize, 1)
        cuts = [param.spec.cut for param in self.params]
        plan = gather_plan(cuts, mode=self._gather_mode(), direct_from_numel=DIRECT_FROM_NBYTES // self.param_dtype.itemsize)
        self.params = [self.params[index] for index in (*plan.direct, *plan.packed)]
        self.num_direct = len(plan.direct)
        cuts = [param.spec.cut for param in self.params]
        self.layout = group_layout(cuts, num_shards=self.mesh.shard_size, align=self.align)
        self.gather: Gather | LocalGather | ExtensionGather | None = None  # made with the unsharded storage at the first unshard
        self.post_forward = None
        self.is_meta = any(param.local_now().is_meta for param in self.params)
        self.flat = None  # before the new one is made: parameters that were moved or cast no longer lie in the old one
        for param in self.params:
            param.take_over_toggle()
            if self.mesh.shard_size == 1:
                param.unsharded = None  # which may be the old one
        for param in self.params:
            param.local = param.local_now()
        self.has_own_memory = any(needs_own_memory(param.local) for param in self.params)
        if self.is_meta:
            return
        if self.has_own_memory:
            self._move_own_memory()
            return
        self.flat = self._new_flat(self.layout.shard_numel, self.dtype)
        with torch.no_grad():
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                place = shard_view(self.flat, slot, param.spec, param.rank)
                place.copy_(param.local_now())
                param.place(place)

    def has_mixed_dtypes(self) -> bool:
        """Whether some of the parameters were cast and others not."""
        return any(param.dtype is not self.params[0].dtype for param in self.params)

    def _refuse_mixed_dtypes(self) -> None:
        if self.has_mixed_dtypes():
            raise ParameterError(
                "parameters that fully_shard grouped by dtype have different ones now",
                items=[f"{param.fqn} {tuple(param.sharded.shape)} {param.dtype}" for param in self.params],
                expected="one dtype for the parameters of one group",
                fix="cast the whole module, or cast the part before fully_shard, which then gives it a group of its own",
            )

    def _move_own_memory(self) -> None:
        """Parameters with all-gather extensions stay what they are; they only come to the right device."""
        for param in self.params:
            local = param.local
            with torch.no_grad():
                if self.options.offload:
                    local = local.cpu()
                    if self.options.pin_memory and not local.is_pinned():
                        local = local.pin_memory()
                elif local.device != self.device:
                    local = local.to(self.device)
            param.place(local)

    def on_meta(self) -> list[str]:
        """Names and shapes of the parameters that have no values yet."""
        return [f"{param.fqn} {tuple(param.sharded.shape)}" for param in self.params if param.local_now().is_meta]

    def _new_flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        device = torch.device("cpu") if self.options.offload else self.device
        return torch.zeros(numel, dtype=dtype, device=device, pin_memory=self.options.offload and self.options.pin_memory)

    def _gather_mode(self) -> str:
        if self.options.gather == "auto" and self.mesh.shard_group is not None:
            # Measured: on gloo direct gathers lose at every size that was tried (0.9x at 1 MB parameters, 0.35x at 16 KB).
            return "packed" if dist.get_backend(self.mesh.shard_group) == "gloo" else "auto"
        return self.options.gather

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_unsharded(self) -> Gather | LocalGather | ExtensionGather:
        """Make the unsharded storage object and the parameters over it, which live as long as this plan."""
        if not self.has_own_memory and any(has_extension(param.local) for param in self.params):
            self.rebuild()  # methods were put on plain local tensors: their neighbours leave the flat shard with them
        if self.has_own_memory:
            return self._make_extension_gather()
        self.storage = self._new_storage()
        like = torch.empty(0, dtype=self.param_dtype, device=self.device)
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            view = storage_view(self.storage, like, slot.unsharded_offset, slot.cut.shape)
            param.unsharded = new_unsharded_param(param, param.spec.to_logical(view))
        if self.mesh.shard_size == 1:
            assert self.flat is not None
            self.gather = LocalGather(self.flat, self._place(), self.streams)
        else:
            self.gather = self._new_gather(self.layout, self.num_direct, self.mesh.shard_group)
        if not self._shares_memory():
            self._allocated_on = self.streams.compute
            free = functools.partial(self.streams.resize, self.storage, 0)  # a method would cost each reshard a call
            self._free = free if self.streams.host_waits else self._free_behind_uses
            self._free()
        return self.gather

    def _free_behind_uses(self) -> None:
        """The memory goes back to the stream that it was allocated on: a side stream of the user's, if ``unshard`` was called there."""
        streams = self.streams
        if self._allocated_on != streams.compute:
            streams.order(self._allocated_on, streams.mark(streams.compute))
        streams.resize(self.storage, 0)

    def _shares_memory(self) -> bool:
        """Whether the flat shard is the unsharded parameters: one rank keeps all of them, as they are computed with."""
        return self.mesh.shard_size == 1 and self.param_dtype is self.dtype and not self.options.offload

    def _new_storage(self) -> torch.UntypedStorage:
        if self._shares_memory():
            assert self.flat is not None
            self._free = _do_nothing
            return self.flat.untyped_storage()
        nbytes = self.layout.unsharded_numel * self.param_dtype.itemsize
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def _make_extension_gather(self) -> ExtensionGather:
        """The unsharded parameters are made by the extensions, out of what was gathered first."""
        gather = ExtensionGather(
            self.params,
            self.mesh,
            self.device,
            self.streams,
            self.param_dtype,
            self.options.mp_policy,
            self.all_gather_comm,
            self.options.all_gather,
        )
        self.gather, self._free = gather, gather.free
        return gather

    def _place(self) -> GatherPlace:
        return GatherPlace(
            storage=self.storage,
            nbytes=self.layout.unsharded_numel * self.param_dtype.itemsize,
            dtype=self.param_dtype,
            device=self.device,
            offsets=[slot.unsharded_offset for slot in self.layout.slots],
        )

    def _new_gather_over(self, layout: GroupLayout, process_group: dist.ProcessGroup | None) -> Gather:
        return self._new_gather(layout, 0, process_group)

    def _new_gather(self, layout: GroupLayout, num_direct: int, process_group: dist.ProcessGroup | None) -> Gather:
        comm, place = self.all_gather_comm, self._place()
        if comm is not None and process_group is not None and process_group.size() > 1:
            return CommGather(layout, place, process_group, self.streams, comm)
        return Gather(layout, num_direct, place, process_group, self.streams, self.options.all_gather)

    def set_all_gather_comm(self, comm: AllGather | None) -> None:
        """Gather through ``comm`` from the next unshard on; None: as the plan says."""
        self.reshard()
        self.all_gather_comm = comm
        self.gather = self.post_forward = None

    # --- unshard ---

    @property
    def is_unsharded(self) -> bool:
        return self.state is GroupState.UNSHARDED

    def issue(self, copy: bool = False) -> None:
        """Start unsharding; no-op if unsharded, or under way. Collective: yes, over the shard axis.

        copy: send a copy of the flat shard, for where the user may write to it before ``wait``.
        """
        if self.state is GroupState.HIDDEN:
            if self.registry.verify():
                self.state = GroupState.UNSHARDED
                self.registry.show_unsharded()
            else:  # the user put other parameters in the places of those that were shown
                self.reshard()
        if self.state is GroupState.SHARDED:
            if not self.registry.verify():
                self.rebuild()
            if self.is_meta:
                raise meta_error(self.on_meta(), str(self.device))
            gather = self.gather or self._make_unsharded()
            gather.start(self.flat, copy)
            self._steps = OPTIMIZER_STEPS.value
            if self.options.offload:
                self._host_read = self.streams.mark(self.streams.gather)
        elif self.state is GroupState.RESHARDED:
            assert self.post_forward is not None
            self.post_forward.issue()
        else:
            return
        if not self.streams.host_waits:
            self._allocated_on = self.streams.compute
        self.state = GroupState.UNSHARDING

    def wait(self) -> None:
        """Make an issued unshard usable on the compute stream and show the unsharded parameters; no-op otherwise."""
        if self.state is GroupState.UNSHARDING:
            self._finish_gather()
            self.state = GroupState.UNSHARDED
            self.registry.show_unsharded()

    def release(self) -> None:
        """End an issued unshard that nobody has waited for, so that the flat shard may be written; no-op otherwise."""
        if self.state is GroupState.UNSHARDING:
            self._finish_gather()
            self.state = GroupState.SHARDED
            if not self.has_own_memory:  # else they are shown; and if an extension raised, there are no others yet
                self.registry.show_sharded()
            self._free()

    def await_host_read(self) -> None:
        """Block until an offloaded flat shard may be written: its writers run on the host, which is ordered behind no stream."""
        if self._host_read is not None:
            self.streams.synchronize(self._host_read)
            self._host_read = None

    def _finish_gather(self) -> None:
        if self.post_forward is not None and self.post_forward.holds_shards:
            self.post_forward.finish()
        else:
            assert self.gather is not None
            self.gather.finish()

    def shards_version(self) -> tuple[int, int]:
        """Changes when a sharded parameter is written: by an optimizer, or in place (but through ``.data`` nobody notices)."""
        return self._steps, sum([param.sharded._version + param.local._version for param in self.params])

    def is_out_of_date(self, version: tuple[int, int]) -> bool:
        """Whether shards were written since they were unsharded, and since ``shards_version`` returned ``version``."""
        return OPTIMIZER_STEPS.value != self._steps or self.shards_version() != version

    # --- reshard ---

    def take_over_toggles(self) -> None:
        """Between iterations, what is shown may have been told to require a gradient or not, and so may the sharded parameters."""
        smaller = self.post_forward.shown if self.post_forward is not None else []
        for param, shown in zip(self.params, smaller, strict=False):  # none, unless resharded to the smaller mesh
            if shown.requires_grad is not param.trainable:
                param.sharded.requires_grad_(shown.requires_grad)
        for param in self.params:
            param.take_over_toggle()
        for param, shown in zip(self.params, smaller, strict=False):
            shown.requires_grad_(param.trainable)

    def hide(self) -> None:
        """Show the sharded parameters, and keep what was gathered for a backward that comes before the next forward.

        One rank may do that alone: freed, it would gather in that backward what the others still have.
        """
        if self.state in (GroupState.UNSHARDED, GroupState.RESHARDED):
            self.take_over_toggles()
            self.registry.show_sharded()
            if self.state is GroupState.UNSHARDED:
                self.state = GroupState.HIDDEN
        self.await_host_read()

    def reshard(self) -> None:
        """Show the sharded parameters and free the unsharded storage; a pending unshard is waited for first."""
        if self.state is GroupState.UNSHARDED:
            self.registry.show_sharded()
            self.state = GroupState.SHARDED
            self._free()
        elif self.state is GroupState.HIDDEN:
            self.state = GroupState.SHARDED
            self._free()
        elif self.state is GroupState.UNSHARDING:
            self.release()
        elif self.state is GroupState.RESHARDED:
            assert self.post_forward is not None
            self.registry.show_sharded()
            self.post_forward.drop()
            self.state = GroupState.SHARDED

    @torch.inference_mode(False)
    @torch.no_grad()
    def reshard_to(self, smaller: DataParallelMesh) -> None:
        """From unsharded to shards over ``smaller``, so that the next unshard gathers among fewer ranks; no-op otherwise."""
        if self.state is GroupState.HIDDEN:
            self.reshard()
        if self.state is not GroupState.UNSHARDED:
            return
        if self.has_own_memory:  # what an extension has made cannot be cut
            self.reshard()
            return
        if self.post_forward is None or self.post_forward.mesh is not smaller:
            self.post_forward = PostForward(smaller, self.params, self._new_gather_over, self.align)
        self.registry.show(self.post_forward.keep_shards())
        self.state = GroupState.RESHARDED
        self._free()


def _do_nothing() -> None:
    """How unsharded parameters that are the flat shard are freed."""


__all__ = ["ALIGN_NBYTES", "DIRECT_FROM_NBYTES", "GroupMemory", "GroupOptions", "GroupState", "Registry"]
