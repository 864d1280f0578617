"""Parameters that are gathered and reduced together: unshard and reshard.

A group belongs to one unit. If one of its parameters is tied to a module of another unit, that unit *borrows* the
group, which then stays unsharded from the first of its holders to the last.

A group owns one flat shard, into which its sharded parameters are views, and one storage for its unsharded parameters.
``issue`` starts an all-gather into that storage, ``wait`` makes its result usable and shows the unsharded parameters to
the modules, ``reshard`` shows the sharded ones again and frees the storage. All parameters of a group have one storage
dtype, one compute dtype, one mesh.

Note: leases. An all-gather reads the flat shard from ``issue`` to its completion: other ranks would see a write in
between (measured: 99 % of the elements). So before a user may write (end of backward, state dict hooks, ``_apply``,
...), the caller ``release``s groups with a pending gather, and ``issue(copy=True)`` sends a copy if the user may write
before the wait. The unsharded storage is leased for writing as long: ``reshard`` of a pending gather waits first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import Tensor

from ...errors import FSDPError, meta_error, misplaced_error, parked_error
from ...lost_ranks import raise_lost
from ...mapped_file import READ_AHEAD, MappedFile, mapped
from ...policy import AllGather
from ...torch_names import torch_autograd, torch_tensors
from ..comm import collective_log
from ..comm.agreement import tell_later
from ..comm.streams import streams_of
from ..plan.mesh import DataParallelMesh
from ..plan.placement import in_dtype
from .all_gather import Gathering
from .gradients import Gradients
from .group_plan import GroupPlan, gradient_dtypes, plan_group
from .options import GroupOptions
from .own_memory import has_extension, leaves_of
from .param import ShardedParam, has_values_of_shard
from .shown_parameters import ModuleRegistry, show
from .smaller_mesh import SmallerShards
from .unsharded import Unsharded


class GroupState(Enum):
    """What a group's parameters are at a moment.

    HIDDEN:     unsharded, while the modules show the sharded ones
    RESHARDED:  sharded over the smaller mesh of ``reshard_after_forward=<int>``
    """

    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()
    HIDDEN = auto()
    RESHARDED = auto()


MOVES = {
    GroupState.SHARDED: {GroupState.UNSHARDING},
    GroupState.UNSHARDING: {GroupState.UNSHARDED, GroupState.SHARDED},
    GroupState.UNSHARDED: {GroupState.SHARDED, GroupState.HIDDEN, GroupState.RESHARDED},
    GroupState.HIDDEN: {GroupState.UNSHARDED, GroupState.SHARDED},
    GroupState.RESHARDED: {GroupState.UNSHARDING, GroupState.SHARDED},
}
"""The moves that a group's state may make; the tests check each move."""


class ParamGroup:
    """Parameters that are gathered and reduced together.

    registry:        shows the parameters to the modules that own them
    all_gather_comm: a custom communicator
    smaller_mesh:    for ``reshard_after_forward=<int>``
    holders:         units that hold the group unsharded, if several may; None if only one unit uses it
    plan, flat:      replaced when parameters were moved or cast; ``flat`` is None on the meta device, and if parameters
                     have memory of their own
    file:            the file that holds ``flat``, or parameters with memory of their own; None: there is no file
    unsharded:       None until the first unshard by this plan
    gathering:       the gather under way, while UNSHARDING
    smaller:         its shards over the smaller mesh, while RESHARDED, or UNSHARDING from these
    keeps_storage:   ``reshard`` leaves the unsharded memory allocated
    written_at:      the moment (``call.next_moment``) when an optimizer of its parameters last began a step, or a state
                     dict was loaded: fused and foreach optimizers do not move the version counters of DTensors
    is_parked:       the shards lie elsewhere (``fsdp2.park``); nothing may use them but to read or write their values
    """

    def __init__(
        self, params: Sequence[ShardedParam], mesh: DataParallelMesh, device: torch.device, options: GroupOptions
    ) -> None:
        self.params = list(params)
        self.mesh = mesh
        self.device = device
        self.streams = streams_of(device)
        self.gradients = Gradients(self.wait)
        self.state = GroupState.SHARDED
        self.all_gather_comm: AllGather | None = None
        self.smaller_mesh: DataParallelMesh | None = None
        self.holders: set[Hashable] | None = None
        self.plan: GroupPlan
        self.flat: Tensor | None = None
        self.file: MappedFile | None = None
        self.unsharded: Unsharded | None = None
        self.gathering: Gathering | None = None
        self.smaller: SmallerShards | None = None
        self.keeps_storage = False
        self.written_at = -1
        self.is_parked = False
        self._num_told = 0  # versions that ``note_write`` has added
        # An offloaded flat shard is being copied to the device, and the host has not waited for the copy.
        self._reads_host = False
        self.rebuild(options)
        self.registry = ModuleRegistry(self.params)

    @property
    def fqn(self) -> str:
        """Of the module that fully_shard was called on, from the root."""
        return self.gradients.fqn

    @fqn.setter
    def fqn(self, fqn: str) -> None:
        self.gradients.fqn = fqn

    @property
    def options(self) -> GroupOptions:
        return self.plan.options

    # --- the plan ---

    @torch.inference_mode(False)
    def rebuild(self, options: GroupOptions | None = None) -> None:
        """Plan again for the parameters as they are now, and move them into a new flat shard; they keep their identity.

        options: new ones, if any

        Memory: one flat shard more than the parameters as they are now.
        """
        assert self.state is GroupState.SHARDED
        self.refuse_parked()
        plan = plan_group(self.params, self.mesh, self.device, self.streams, options or self.plan.options)
        self.plan, self.params, self.unsharded = plan, plan.params, None
        self.flat = None  # before the new one is made: parameters that were moved or cast no longer lie in the old one
        for param in plan.params:
            if param.spec.sharded.tensor_meta is None or param.spec.sharded.tensor_meta.dtype is not plan.dtype:
                param.spec = replace(param.spec, sharded=in_dtype(param.spec.sharded, plan.dtype))
            param.take_over_toggle()
            if self.mesh.shard_size == 1 and (param.unsharded is None or param.unsharded.grad is None):
                param.unsharded = None  # it may be a view of the old flat shard
            param.local = param.local_now()
            param.leave_flat()
        self.gradients.follow(plan)
        if plan.is_meta:
            return
        if plan.has_own_memory:
            self._move_own_memory()
            return
        self.flat = self._new_flat(plan.layout.shard_numel, plan.dtype)
        for param, slot in zip(plan.params, plan.layout.slots, strict=True):
            param.enter_flat(self.flat, slot)
        self._write_file()

    def align_to(self, block: int) -> None:
        """From now on, no block of so many elements of the flat shard spans two parameters. Every rank must call it."""
        wanted = math.lcm(self.options.block, block)
        if wanted != self.options.block:
            self.reshard()
            self.rebuild(replace(self.options, block=wanted))

    def _move_own_memory(self) -> None:
        """Move parameters with all-gather extensions to the right device; they stay as they are otherwise."""
        for param in self.params:
            local = param.local
            with torch.no_grad():
                if self.options.offload:
                    local = local.cpu()
                    if self.options.pin_memory and self.options.folder is None and not local.is_pinned():
                        local = local.pin_memory()
                elif local.device != self.device:
                    local = local.to(self.device)
            param.move_to(local)
        if self.options.folder is not None:
            locals_ = [param.local for param in self.params]
            try:
                self.file, copies = mapped(
                    self.options.folder, [leaf for local in locals_ for leaf in leaves_of(local)], self._what()
                )
                for leaf, copy in copies:
                    torch_tensors.set_data(leaf, copy)
            except FSDPError as error:  # of this rank alone: the parameters stay in memory until ranks meet
                tell_later(error)
            self._write_file()

    def _write_file(self) -> None:
        if self.file is not None:
            try:
                self.file.write_back()
            except FSDPError as error:
                tell_later(error)

    def _what(self) -> str:
        return f"parameters of {self.params[0].fqn} and others"

    def on_meta(self) -> list[str]:
        """Names and shapes of the parameters that have no values yet."""
        return [f"{param.fqn} {tuple(param.sharded.shape)}" for param in self.params if param.local_now().is_meta]

    def _new_flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.options.folder is not None:
            try:
                self.file = MappedFile(self.options.folder, numel * dtype.itemsize, self._what())
                return self.file.tensor(dtype, numel)
            except FSDPError as error:  # of this rank alone: the parameters stay in memory until ranks meet
                self.file = None
                tell_later(error)
        device = torch.device("cpu") if self.options.offload else self.device
        return torch.zeros(
            numel, dtype=dtype, device=device, pin_memory=self.options.offload and self.options.pin_memory
        )

    def _make_unsharded(self) -> Unsharded:
        plan = self.plan
        kept_on = torch.device("cpu") if plan.options.offload else self.device
        # ``verify`` has moved the values of these to the right device, but the DTensors themselves name another.
        misplaced = [param for param in self.params if param.sharded.device.type != kept_on.type]
        if misplaced:
            raise misplaced_error([f"{each.fqn} on {each.sharded.device}" for each in misplaced], str(kept_on))
        if gradient_dtypes(self.params, plan.options, plan.dtype, plan.param_dtype) != plan.gradients:
            self.rebuild()  # ``grad_dtype`` was set on sharded parameters
        elif not plan.has_own_memory and any(has_extension(param.local) for param in self.params):
            self.rebuild()  # methods were put on plain local tensors: their neighbors leave the flat shard with them
        self.unsharded = Unsharded(self.plan, self.flat, self.all_gather_comm)
        self.registry.forget()
        return self.unsharded

    def keep_storage(self, keep: bool) -> None:
        """Choose whether the unsharded memory stays allocated, at one address, while the parameters are sharded."""
        self.keeps_storage = keep
        if self.unsharded is not None and not keep and self.state in (GroupState.SHARDED, GroupState.RESHARDED):
            self.unsharded.free()

    def set_all_gather_comm(self, comm: AllGather | None) -> None:
        """Gather through ``comm`` from the next unshard on; None: by the plan's algorithm."""
        self.reshard()
        self.all_gather_comm = comm
        self.unsharded = None

    def refuse_parked(self) -> None:
        """Raises: ParkedError if it is parked."""
        if self.is_parked:
            raise parked_error([param.fqn for param in self.params])

    # --- unshard ---

    @property
    def is_unsharded(self) -> bool:
        return self.state is GroupState.UNSHARDED

    def issue(self, copy: bool = False, together: list[Gathering] | None = None) -> None:
        """Start unsharding; no-op if unsharded or under way. Collective: yes, over the shard axis.

        copy:     send a copy of the flat shard, because the user may write to it before ``wait``
        together: see ``Gather.start``
        """
        if self.state is GroupState.HIDDEN:
            if self.registry.verify(self.plan.has_own_memory):
                self.state = GroupState.UNSHARDED
                self.registry.show(unsharded=True)
                if self.registry.written:
                    self.tell_of_writes()
            else:  # the user replaced parameters that the modules showed
                self.reshard()
        if self.state is GroupState.SHARDED:
            freed_nbytes = 0
            if (
                self.unsharded is not None
                and self.unsharded.storage is not None
                and (self.unsharded.shares or self.unsharded.storage.nbytes() == 0)
                and torch_autograd.current_graph_task() == -1
            ):
                freed_nbytes = self.unsharded.freed_nbytes
            if not self.registry.verify(self.plan.has_own_memory, freed_nbytes):
                self.rebuild()
            if self.registry.written:
                self.tell_of_writes()
            if self.plan.is_meta:
                raise meta_error(self.on_meta(), str(self.device))
            if self.is_parked:
                self.refuse_parked()
            unsharded = self.unsharded or self._make_unsharded()
            if self.file is not None:
                READ_AHEAD.begin(self.file, self.plan.options.read_ahead)
        elif self.state is GroupState.RESHARDED:
            assert self.unsharded is not None
            unsharded = self.unsharded
        else:
            return
        if collective_log.current is not None:
            self._log_gather(collective_log.current)
        try:
            if self.smaller is not None:
                self.gathering = self.smaller.start(together)
            else:
                flat, self._reads_host = self.flat, self.plan.options.offload
                if flat is not None and self.file is not None and self.plan.options.pin_memory:
                    # A copy from a file's own memory would make the host wait for all work of the stream.
                    flat = flat.pin_memory()
                    self._reads_host = False
                self.gathering = unsharded.gather.start(flat, copy, together)
                unsharded.written_at = self.written_at
        except BaseException:  # out of memory for what it sends: the storage may have been allocated
            self._free_unused(unsharded)
            raise
        unsharded.allocated_on = self.streams.compute
        self.state = GroupState.UNSHARDING

    def wait(self) -> None:
        """Make an issued unshard usable on the compute stream and show the unsharded parameters; no-op otherwise."""
        if self.state is GroupState.UNSHARDING:
            gathering, unsharded = self._finish_gather()
            if unsharded.extensions is not None:
                try:
                    unsharded.extensions.fill(gathering)
                except BaseException:
                    self.cancel()
                    raise
            self.state = GroupState.UNSHARDED
            self.registry.show(unsharded=True)

    def release(self) -> None:
        """Wait for an issued unshard, so that the flat shard may be written; no-op otherwise."""
        if self.state is GroupState.UNSHARDING:
            _, unsharded = self._finish_gather()
            self.state = GroupState.SHARDED
            if unsharded.extensions is None:  # else they are shown, and there may be no others yet
                self.registry.show(unsharded=False)
            else:
                unsharded.extensions.let_go()
            if not self.keeps_storage:
                unsharded.free()

    def cancel(self) -> None:
        """Forget an issued unshard that could not be sent, or whose values could not be made: nothing will arrive."""
        if self.state is GroupState.UNSHARDING:
            unsharded, self.gathering = self.unsharded, None
            assert unsharded is not None
            if self.smaller is not None:
                self.smaller.drop()
                self.smaller = None
                self.registry.show(unsharded=False)
            self.state = GroupState.SHARDED
            self._free_unused(unsharded)

    def _free_unused(self, unsharded: Unsharded) -> None:
        """Free the memory that a failed gather has allocated: on the host there is none yet, except of extensions."""
        if unsharded.extensions is not None or not self.streams.host_waits:
            self.streams.order(self.streams.compute, self.streams.mark(self.streams.gather))
            if unsharded.extensions is not None:
                unsharded.extensions.let_go()
            if not self.keeps_storage:
                unsharded.free()

    def await_host_read(self) -> None:
        """Block until an offloaded flat shard may be written: its writers run on the host, which no stream orders."""
        if self._reads_host:
            self.streams.synchronize(self.streams.mark(self.streams.gather))
            self._reads_host = False

    def _finish_gather(self) -> tuple[Gathering, Unsharded]:
        gathering, unsharded = self.gathering, self.unsharded
        assert gathering is not None
        assert unsharded is not None
        log = collective_log.current
        if log is not None:
            log.waits(self, "all-gather")
        try:
            gathering.finish()
        except BaseException as error:  # on the host also out of memory: the storage may not be allocated
            self.cancel()
            if isinstance(error, RuntimeError):
                raise_lost(error, f"the all-gather of {self.fqn or 'the root'}")
            raise
        self.gathering = None
        if self.smaller is not None:
            self.smaller.drop()
            self.smaller = None
        elif self.file is not None:
            READ_AHEAD.end(self.file)
        if log is not None:
            log.done(self, "all-gather", self.streams, self.streams.compute)
        return gathering, unsharded

    def _log_gather(self, log: collective_log.CollectiveLog) -> None:
        mesh = self.smaller_mesh if self.state is GroupState.RESHARDED else self.mesh
        if mesh is not None and mesh.shard_group is not None and mesh.shard_size > 1:
            numel, dtype = self.plan.layout.unsharded_numel, self.plan.param_dtype
            log.issued(self, "all-gather", self.fqn or "the root", numel, dtype, mesh.shard_group)

    def shards_version(self) -> tuple[int, int]:
        """Changes when an optimizer or an in-place operation writes a shard; see Note: writes to kept parameters."""
        written_at = self.written_at if self.unsharded is None else self.unsharded.written_at
        return written_at, sum([param.sharded._version + param.local._version for param in self.params])

    def adopt_replaced(self) -> bool:
        """Whether the user replaced shown unsharded parameters; see ``ModuleRegistry.adopt_replaced``."""
        if self.state is GroupState.RESHARDED and self.smaller is not None:
            return self.registry.adopt_replaced(self.smaller.shown)
        return self.state is GroupState.UNSHARDED and self.registry.adopt_replaced([])

    def is_out_of_date(self, version: tuple[int, int]) -> bool:
        """Whether shards were written since they were unsharded, and since ``shards_version`` returned ``version``."""
        now = self.shards_version()
        return now[0] != self.written_at or now != version

    def note_write(self, moment: int, params: Sequence[ShardedParam]) -> None:
        """An optimizer or a load writes the shards of ``params``: the next gather brings new values.

        Autograd learns it from the unsharded parameters' version counters: a backward of a graph that has saved one of
        them raises, as in the unsharded model.
        """
        self.written_at = moment
        self._tell_graphs(params)

    def look_for_writes(self) -> None:
        """A backward begins, with the group unsharded: do as each gather does in ``verify``."""
        for param in self.params:
            if (version := param.sharded._version + param.local._version) != param.version:
                self.registry.written += [param] if param.version >= 0 else []
                param.version = version
        if self.registry.written:
            self.tell_of_writes()

    def tell_of_writes(self) -> None:
        """Tell graphs which shards the user has written in place; optimizers and loads have told of theirs."""
        written, self.registry.written = self.registry.written, []
        if self.unsharded is None or self.unsharded.written_at == self.written_at:
            self._tell_graphs(written)

    def _tell_graphs(self, params: Sequence[ShardedParam]) -> None:
        saved = [param.unsharded for param in params if param.unsharded is not None]
        torch.autograd.graph.increment_version(saved)
        self._num_told += len(saved)

    def unsharded_version(self) -> int:
        """Changes when the user writes in place an unsharded parameter, or a shard over the smaller mesh."""
        smaller = self.smaller if self.state is GroupState.RESHARDED else None
        versions = [param.unsharded._version for param in self.params if param.unsharded is not None]
        return sum(versions) - self._num_told + (0 if smaller is None else smaller.num_writes())

    def written_unseen(self) -> list[ShardedParam]:
        """Parameters whose unsharded values are not those of this rank's shard. The host waits for a device.

        Collective: no.
        """
        if self.smaller is not None and self.state is GroupState.RESHARDED:
            return self.smaller.written_unseen()
        if self.plan.has_own_memory or self.all_gather_comm is not None:
            return []  # extensions and communicators of the user may gather other values than the shard's
        if self.state not in (GroupState.UNSHARDED, GroupState.HIDDEN):
            return []
        return [param for param in self.params if not has_values_of_shard(param)]

    # --- reshard ---

    def take_over_toggles(self) -> None:
        """Take over ``requires_grad`` that the user set between iterations, on the shown or the sharded parameters."""
        smaller = [] if self.smaller is None else self.smaller.shown
        for param, shown in zip(self.params, smaller, strict=False):  # empty unless resharded to the smaller mesh
            if shown.requires_grad is not param.trainable:
                param.sharded.requires_grad_(shown.requires_grad)
        for param in self.params:
            param.take_over_toggle()
        for param, shown in zip(self.params, smaller, strict=False):
            shown.requires_grad_(param.trainable)

    def hide(self) -> None:
        """Show the sharded parameters, and keep the unsharded memory for a backward that comes before the next forward.

        One rank may do that alone; if it freed the memory, it would gather in that backward what others still have.
        """
        if self.state in (GroupState.UNSHARDED, GroupState.RESHARDED):
            self.take_over_toggles()
            self.registry.show(unsharded=False)
            if self.state is GroupState.UNSHARDED:
                self.state = GroupState.HIDDEN
        self.await_host_read()

    def keep_if_frozen(self) -> bool:
        """Hide what is unsharded, if no parameter is trainable. Return whether it is hidden now."""
        self.take_over_toggles()
        if self.state is GroupState.UNSHARDED and not any(param.trainable for param in self.params):
            self.hide()
        return self.state is GroupState.HIDDEN

    def reshard(self) -> None:
        """Show the sharded parameters and free the unsharded storage; it waits for a pending unshard first."""
        before, unsharded = self.state, self.unsharded
        if before is GroupState.SHARDED:
            return
        if before is GroupState.UNSHARDING:
            self.release()
            return
        assert unsharded is not None
        if before is not GroupState.HIDDEN:
            self.registry.show(unsharded=False)
        self.state = GroupState.SHARDED
        if self.smaller is not None:
            self.smaller.drop()
            self.smaller = None
        elif not self.keeps_storage:
            unsharded.free()

    @torch.inference_mode(False)
    @torch.no_grad()
    def reshard_to_smaller(self) -> None:
        """Turn unsharded parameters into shards over the smaller mesh, so the next unshard gathers among fewer ranks.

        No-op in other states. Without a smaller mesh it is ``reshard``, and also if parameters have memory of their
        own: results of extensions cannot be cut.
        """
        if (
            self.smaller_mesh is None
            or self.state is GroupState.HIDDEN
            or (self.state is GroupState.UNSHARDED and self.plan.has_own_memory)
        ):
            self.reshard()
        elif self.state is GroupState.UNSHARDED:
            assert self.unsharded is not None
            smaller = self.unsharded.cut_for(self.smaller_mesh)
            show(self.params, smaller.shown)
            self.state, self.smaller = GroupState.RESHARDED, smaller
            if not self.keeps_storage:
                self.unsharded.free()

    def reshard_for_all(self) -> None:
        """Reshard, even if units hold the group."""
        if self.holders:
            self.holders.clear()
        self.take_over_toggles()
        self.reshard()
