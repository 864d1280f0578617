"""A unit's state under torch's private names: what ``module._get_fsdp_state()`` returns to the projects that read them.

    state._fsdp_param_group.post_forward_mesh_info = None        # verl: keep the parameters after forward
    state._fsdp_param_group.reshard_after_backward               # axolotl, before a backward in tiles
    state._mp_policy.param_dtype                                 # NeMo Automodel, for a sharded lm_head
    state._comm_ctx.all_gather_stream                            # xtuner, which copies activations on it

``docs/clients.md`` lists the readers. What a name tells is read from the unit when it is asked for; what is written to it becomes what
the public setter would make of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..core.comm.streams import Stream, streams_of
from ..core.group.param import ShardedParam
from ..core.group.param_group import GroupState, ParamGroup
from ..core.iteration.finalization import CommContext
from ..core.iteration.first_forward import refuse_meta
from ..core.iteration.module_state import ModuleState, units_below
from ..core.plan.mesh import read_mesh_info
from ..errors import ArgumentError
from ..hints.compiler_orders import warn_of_losing_orders
from ..hints.mixed_tensors import explain_mixed_tensors
from ..hints.same_models import require_same_as_neighbors
from ..hints.unmanaged_parameters import warn_of_plain_parameters, watch_registrations
from ..max_norm import shrinking_weights
from ..optimizer_steps import watch_optimizers
from ..sharding_arguments import refuse_symmetric_inputs, warn_of_ignored_prefetch
from . import torch_names
from .memory_tracker import TrackedState


class ClientState(TrackedState):
    """The state that ``fully_shard`` leaves on a module, with the names that other projects read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch_optimizers()
        watch_registrations()

    def extend(self, groups: Iterable[ParamGroup], borrowed: Iterable[ParamGroup]) -> None:
        super().extend(groups, borrowed)
        self.max_norm_weights = shrinking_weights(self.groups)

    _mp_policy = property(attrgetter("mp_policy"))

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.options.reshard_is_default

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, is_default: bool) -> None:
        self.choose(reshard_is_default=is_default)

    @property
    def _fsdp_param_groups(self) -> list[ParamGroupNames]:
        """One for each mesh that parameters of the unit are sharded over, as torch groups them; dtypes make no difference here."""
        by_mesh: dict[tuple[int, int], list[ParamGroup]] = {}
        for group in self.groups:
            by_mesh.setdefault(group.mesh.groups, []).append(group)
        return [ParamGroupNames(self, groups) for groups in by_mesh.values()]

    @property
    def _fsdp_param_group(self) -> ParamGroupNames | None:
        """Raises: ArgumentError if the parameters of the unit are sharded over several meshes."""
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise ArgumentError(
                f"_fsdp_param_group of {self.fqn or 'the root'} is asked for, which shards parameters over {len(groups)} meshes",
                expected="one mesh",
                fix="read _fsdp_param_groups, which has an entry for each mesh",
            )
        return groups[0] if groups else None

    @property
    def _comm_ctx(self) -> CommContextNames:
        """The same object for roots that share their communication context, which pipeline schedules compare by its id."""
        context = self.shared_context()
        names = _contexts.get(context)
        if names is None:
            names = _contexts[context] = CommContextNames(*_streams(self.device))
        return names

    def check_before_first_forward(self, units: Sequence[ModuleState]) -> None:
        refuse_symmetric_inputs(units)
        require_same_as_neighbors(units)
        for unit in units:
            warn_of_ignored_prefetch(unit, self)

    def give_hints(self, is_compiled: bool) -> None:
        assert self.schedule is not None
        warn_of_plain_parameters(self.modules[0], self.schedule.tree.units)
        warn_of_losing_orders(self.modules[0], self.schedule.tree.units, is_compiled)

    def look_at_registered(self) -> None:
        warn_of_plain_parameters(self.modules[0], [unit for _, unit in units_below(self.modules[0])])

    def explain(self, error: BaseException | None) -> None:
        explain_mixed_tensors(error)

    def _lazy_init(self) -> None:
        """As in torch before the first forward: give parameters their names from the root, refuse those on the meta device."""
        refuse_meta([unit for _, unit in units_below(self.modules[0])])


@dataclass(frozen=True, eq=False)
class CommContextNames:
    """The streams of a device. ``all_gather_state`` is None: no gathered buffer outlives the gather that fills it."""

    all_gather_copy_in_stream: Stream
    all_gather_stream: Stream
    reduce_scatter_stream: Stream
    all_reduce_stream: Stream
    all_gather_state: None = None
    reduce_scatter_state: None = None


_contexts: weakref.WeakKeyDictionary[CommContext, CommContextNames] = weakref.WeakKeyDictionary()


def _streams(device: torch.device) -> tuple[Stream, Stream, Stream, Stream]:
    """Streams as torch has them; on the CPU, where nothing is queued, torch's stand-in for a stream."""
    streams = streams_of(device)
    if streams.host_waits:
        return (torch.cpu.current_stream(),) * 4
    return streams.copy_in, streams.gather, streams.reduce, streams.all_reduce


def _moment(name: str) -> property:
    """What runs around a moment of a unit's backward; trackers read it, and put their own in its place."""
    return property(lambda self: self._unit.around(name), lambda self, function: self._unit.put_around(name, function))


class ParamGroupNames:
    """The parameters of a unit that are sharded over one mesh, as torch's parameter group is read."""

    def __init__(self, unit: ClientState, groups: Sequence[ParamGroup]) -> None:
        self._unit = unit
        self._groups = groups
        self._first = groups[0]

    modules = property(attrgetter("_unit.modules"))
    device = property(attrgetter("_unit.device"))
    mp_policy = property(attrgetter("_unit.mp_policy"))
    reduce_grads = property(attrgetter("_unit.micro_batch.reduces"))
    all_reduce_grads = property(attrgetter("_unit.micro_batch.all_reduces"))
    gradient_divide_factor = property(attrgetter("_first.gradients.options.divide_factor"))
    force_sum_reduction_for_comms = property(attrgetter("_first.gradients.options.sum_only"))
    _reduce_dtype = property(attrgetter("_first.plan.reduce_dtype"))
    pre_backward = _moment("begin")
    post_backward = _moment("reduce")

    @property
    def fsdp_params(self) -> list[ParamNames]:
        return [ParamNames(param, group) for group in self._groups for param in group.params]

    @property
    def mesh_info(self) -> Any:
        """torch's FSDPMeshInfo, HSDPMeshInfo or DDPMeshInfo."""
        return torch_names.mesh_info(self._first.mesh)

    @property
    def post_forward_mesh_info(self) -> Any:
        """The mesh over which parameters are sharded after forward; None if they stay unsharded."""
        if self._unit.options.reshard_after_forward is False:
            return None
        smaller = self._first.smaller_mesh
        return self.mesh_info if smaller is None else torch_names.mesh_info(smaller)

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, mesh_info: Any) -> None:
        if mesh_info is None:
            self._unit.choose(reshard_after_forward=False, reshard_is_default=False)
            return
        mesh = read_mesh_info(mesh_info)
        is_whole = mesh.shard_size == self._first.mesh.shard_size
        for group in self._groups:
            group.smaller_mesh = None if is_whole else mesh
        self._unit.choose(reshard_after_forward=True if is_whole else mesh.shard_size, reshard_is_default=False)

    @property
    def reshard_after_backward(self) -> bool:
        return self._unit.micro_batch.reshards

    @reshard_after_backward.setter
    def reshard_after_backward(self, reshards: bool) -> None:
        self._unit.set_micro_batch(replace(self._unit.micro_batch, reshards=reshards))

    @property
    def is_sharded(self) -> bool:
        return all(group.state is GroupState.SHARDED for group in self._groups)

    @property
    def is_unsharded(self) -> bool:
        return all(group.state is GroupState.UNSHARDED for group in self._groups)

    @property
    def _all_gather_result(self) -> ParamGroupNames | None:
        """Something while an all-gather is under way, else None: readers only ask which."""
        return self if any(group.state is GroupState.UNSHARDING for group in self._groups) else None

    @property
    def _training_state(self) -> Any:
        return torch_names.idle()

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        """Readers set the state to idle before ``reshard()``, which does not need it here. Raises: ArgumentError for other states."""
        if state is not torch_names.idle():
            raise ArgumentError(
                f"_training_state of {self._unit.fqn or 'the root'} is set to {state}",
                expected="TrainingState.IDLE, which changes nothing",
                fix="remove the assignment: fsdp2 tracks forward and backward itself",
            )


class ParamNames:
    """One sharded parameter, as torch's ``FSDPParam`` is read."""

    def __init__(self, param: ShardedParam, group: ParamGroup) -> None:
        self._param = param
        self._group = group

    sharded_param = property(attrgetter("_param.sharded"))
    _param_fqn = property(attrgetter("_param.fqn"))
    orig_dtype = property(attrgetter("_param.dtype"))
    param_dtype = property(attrgetter("_group.plan.param_dtype"))

    @property
    def unsharded_param(self) -> nn.Parameter:
        """Raises: AttributeError before the first unshard, as torch's does."""
        if self._param.unsharded is None:
            raise AttributeError(f"{self._param.fqn} has not been unsharded yet")
        return self._param.unsharded

    _unsharded_param = unsharded_param

    @property
    def _module_info(self) -> ModuleInfoNames:
        owner, *others = self._param.owners
        return ModuleInfoNames(owner.module, owner.name, [each.module for each in others], [each.name for each in others])

    @property
    def mesh_info(self) -> Any:
        return torch_names.mesh_info(self._group.mesh)


@dataclass(frozen=True)
class ModuleInfoNames:
    """Where a parameter is registered; tied parameters have several places."""

    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module]
    shared_param_names: list[str]
