"""What tools may know of a sharded model: its units, groups and parameters, the bytes that they keep, and events as they happen.

    for unit in fsdp2.inspect.units(model):
        print(unit.name, [(param.fqn, param.shape, param.dim) for group in unit.groups for param in group.params])

    undo = fsdp2.inspect.listen(listener)  # its methods are called at each collective, and where units begin and end

``units`` takes modules that ``fsdp2.fully_shard`` sharded and those of torch's own FSDP2, and fills the same values for both. Values
are those of the moment of the call; what changes from step to step is a function (``param.unsharded()``). Views are made anew by
each call: compare them by ``param.sharded``.

The doctor, the inspector, the hang tools and the summary know the core by this file alone, but for torch's private names. Nothing here
communicates but ``exchange``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.comm import agreement
from ..core.comm.collective_log import during
from ..core.group.param import Owner, ShardedParam, own_shard, sharded_from, shards
from ..core.group.param_group import ParamGroup
from ..core.group.reduction import Reduction
from ..core.iteration.module_state import ModuleState, named_units, names_from, sharded_parameters, unit_with
from ..core.iteration.module_state import unit_of as _unit_of
from ..core.iteration.unit import Unit as _Unit
from ..core.modules.tensors import find_tensors
from ..errors import FSDPError
from ..lost_ranks import lost_ranks, number_of_world
from ..optimizer_steps import STEPS, optimizers_that_stepped, watch_optimizers
from ..torch_names import torch_modules, torch_tensors
from . import events, torch_fsdp2
from .events import CollectiveLog, Listener, Record, Stage, at_disk
from .views import Group, Kind, Parameter, Unit, local_of, storages_of

__all__ = [
    "CollectiveLog",
    "Group",
    "Kind",
    "Listener",
    "Owner",
    "Parameter",
    "Record",
    "Stage",
    "Unit",
    "at_disk",
    "buffers_of",
    "current_step",
    "during",
    "exchange",
    "find_tensors",
    "groups_of_process",
    "is_sharded",
    "listen",
    "local_of",
    "lost_ranks",
    "number_of_world",
    "optimizers_that_stepped",
    "parameters_of",
    "recording",
    "roots_of",
    "state_tensors",
    "storages_of",
    "units",
    "unmanaged_parameters",
    "written_unseen",
]

T = TypeVar("T")


def units(model: nn.Module) -> list[Unit]:
    """The units in the tree of ``model``, in the order of ``named_modules()``; none if nothing in it is sharded. Collective: no

    Example:
        [unit.name for unit in fsdp2.inspect.units(model)]
    """
    found = named_units(model)
    names = names_from(model, found)
    return [_unit(name, unit, names) for name, unit in found] + torch_fsdp2.units(model)


def is_sharded(module: nn.Module) -> bool:
    """Whether a ``fully_shard`` call was made on this very module."""
    return _unit_of(module) is not None or torch_fsdp2.state_of(module) is not None


# --- modules of fsdp2.fully_shard ---------------------------------------------------------------------------------------------------


def _unit(name: str, unit: ModuleState, names: Mapping[ShardedParam, str]) -> Unit:
    def on_backward_end(call: Callable[[], None]) -> Callable[[], None]:
        unit.watchers = (*unit.watchers, call)
        return lambda: setattr(unit, "watchers", tuple(each for each in unit.watchers if each != call))

    return Unit(
        name=name,
        event_name=lambda: unit.fqn or "the root",
        made_by="fsdp2",
        modules=unit.modules,
        groups=[_group(name, group, names) for group in unit.groups],
        borrowed=[_group(name, group, names) for group in unit.borrowed],
        mp_policy=unit.mp_policy,
        reshard_after_forward=unit.options.reshard_after_forward,
        is_kept_as_root=unit.options.reshard_is_default,
        reduces=lambda: unit.micro_batch.reduces,
        all_reduces=lambda: unit.micro_batch.all_reduces or unit.micro_batch.accumulates_shards,
        accumulates=lambda: not (unit.micro_batch.reduces and unit.micro_batch.all_reduces),
        reshards=lambda: unit.micro_batch.reshards,
        contributes=lambda: unit.micro_batch.contributes,
        on_backward_end=on_backward_end,
    )


def _group(name: str, group: ParamGroup, names: Mapping[ShardedParam, str]) -> Group:
    mesh, plan = group.mesh, group.plan
    return Group(
        name=name,
        params=[_parameter(param, names.get(param, param.fqn)) for param in group.params],
        device=group.device,
        ranks=mesh.ranks,
        num_shards=None if mesh.shard_axis is None else mesh.shard_size,
        num_replicas=None if mesh.replicate_axis is None else mesh.replicate_size,
        shard_group=mesh.shard_group,
        replicate_group=mesh.replicate_group,
        dtype=plan.dtype,
        param_dtype=plan.param_dtype,
        reduce_dtype=plan.reduce_dtype,
        chosen_dtype=group.options.param_dtype,
        is_offloaded=group.options.offload,
        sharded_nbytes=plan.layout.shard_numel * plan.dtype.itemsize,
        padding_nbytes=sum(slot.gap for slot in plan.layout.slots) * plan.dtype.itemsize,
        unsharded_nbytes=plan.unsharded_nbytes,
        divide_factor=lambda: group.gradients.options.divide_factor,
        has_unreduced=lambda: group.gradients.has_unreduced,
        memory=lambda: _memory(group),
    )


def _parameter(param: ShardedParam, fqn: str) -> Parameter:
    spec = param.spec
    return Parameter(
        fqn=fqn,
        owners=param.owners,
        sharded=param.sharded,
        shape=spec.cut.shape if spec.order is None else tuple(spec.cut.shape[spec.order.index(dim)] for dim in range(len(spec.order))),
        dim=spec.dim,
        num_shards=spec.cut.num_shards,
        unsharded=lambda: param.unsharded,
        piece_of=lambda whole: spec.to_logical(own_shard(whole, spec, param.rank)),
    )


def _memory(group: ParamGroup) -> Iterator[tuple[Kind, torch.UntypedStorage]]:
    shards = [param.local for param in group.params] if group.flat is None else [group.flat]
    shown = [each for param in group.params for each in (param.sharded, param.unsharded) if each is not None]
    grads = [*group.gradients.unreduced, *(each.grad for each in shown if each.grad is not None)]
    yield from (("parameters", storage) for shard in shards for storage in storages_of(shard))
    yield from (("unsharded", storage) for storage in ([] if group.unsharded is None else group.unsharded.storages()))
    yield from (("gradients", storage) for grad in grads for storage in storages_of(grad))


def parameters_of(tensors: Iterable[Tensor]) -> dict[int, Parameter]:
    """The parameters that ``tensors`` stand for, by the id of each: a shard, an unsharded parameter, or the original of one."""
    given, known = {id(each): each for each in tensors}, sharded_parameters()
    found = {key: sharded_from(each) or known.get(key, (None,))[0] for key, each in given.items()}
    ours = {key: _parameter(param, param.fqn) for key, param in found.items() if param is not None}
    return ours | {key: torch_fsdp2.parameter(param, {}) for key, (param, _) in torch_fsdp2.known(given.values()).items()}


def roots_of(tensors: Iterable[Tensor]) -> Iterator[nn.Module]:
    """The modules whose forward begins the steps of these, as far as they are sharded parameters, or were whole ones before."""
    given = list(tensors)
    for param in parameters_of(given).values():
        if id(param.sharded) in shards():
            unit = unit_with(shards()[id(param.sharded)])
            yield (unit if unit.schedule is None else unit.schedule.tree.root).modules[0]
    yield from (torch_fsdp2.root_of(state) for _, state in torch_fsdp2.known(given).values())


def groups_of_process() -> list[Group]:
    """All living groups in this process but those of a planner's rehearsal, which have no memory."""
    groups = {
        id(group): group for param, group in sharded_parameters().values() if not isinstance(param.local, torch_tensors.FakeTensor)
    }
    return [_group(group.fqn, group, {}) for group in groups.values()] + torch_fsdp2.groups_of_process()


def plain_parameters(root: nn.Module, units: Collection[_Unit], frozen: bool = False) -> dict[str, nn.Parameter]:
    """The trainable parameters below ``root``, by name, that none of ``units`` has and no other torch API averages.

    frozen: as well as those that are frozen now
    """
    places = [owner for unit in units for owner in unit.ignored]
    places += [owner for unit in units for group in unit.groups for param in group.params for owner in param.owners]
    known = {(id(owner.module), owner.name) for owner in places}
    foreign = {
        below
        for module in root.modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
        or ({"fully_shard", "replicate"} & set(torch_modules.applied_apis(module)) and _unit_of(module) is None)
        for below in module.modules()
    }
    return {
        f"{prefix}.{name}" if prefix else name: param
        for prefix, module in root.named_modules()
        if module not in foreign
        for name, param in module._parameters.items()
        if param is not None and (frozen or param.requires_grad) and (id(module), name) not in known
    }


def unmanaged_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of ``model``, by name, that no ``fully_shard`` call took, nor another way of torch to average them."""
    known = sharded_parameters().keys() | torch_fsdp2.parameters().keys()  # those of a unit around the model, too
    plain = plain_parameters(model, [unit for _, unit in named_units(model)])
    return {name: param for name, param in plain.items() if id(param) not in known}


def written_unseen(model: nn.Module) -> list[str]:
    """Parameters by name, kept unsharded, whose shards were written where no version counter shows it: forward uses old values.

    The host waits for a device. Collective: no
    """
    found = named_units(model)
    names = names_from(model, found)
    trees = dict.fromkeys(unit.schedule.tree for _, unit in found if unit.schedule is not None)
    return [names.get(param, param.fqn) for tree in trees for param in tree.written_unseen()]


def state_tensors(optimizer: Optimizer, of_any_shape: bool = False) -> list[Tensor]:
    """The tensors of its state that have the shape of their parameter, as it keeps them; step counters have none. Or all."""
    asks = getattr(optimizer, "state_tensors", None)  # of our flat optimizers: their ``state`` may be dequantized
    if asks is not None:
        return list(asks())
    pairs = [(owner, each) for owner, values in optimizer.state.items() for each in values.values() if isinstance(each, Tensor)]
    if of_any_shape:
        return [each for _, each in pairs]
    return [each for owner, each in pairs if each.shape == getattr(owner, "shape", None) and each.ndim > 0]  # a key may be a name


# --- events -------------------------------------------------------------------------------------------------------------------------


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` from now on at each event of every sharded module in this process.

    Returns:    a function that ends it; a second call does nothing
    Collective: no. Costs nothing while nobody listens: each hook checks a flag, and modules of torch's FSDP2 have no hook

    Example:
        undo = fsdp2.inspect.listen(fsdp2.inspect.Listener())
        model(x).sum().backward()
        undo()
    """
    _count_steps()
    events.listen(listener, current_step)
    undo = ExitStack()
    undo.callback(events.ignore, listener)
    return undo.close


def _count_steps() -> None:
    """Without a module of ours, nothing has counted optimizers' steps so far."""
    if not STEPS.sharded and torch_fsdp2.living_states():
        watch_optimizers()


def recording() -> AbstractContextManager[CollectiveLog]:
    """Inside, keep records of collectives, which are numbered from here on, equally on all ranks."""
    _count_steps()
    return events.switched_on(current_step)


def current_step() -> int:
    """How many steps of any optimizer have begun, plus 1. On torch's FSDP2 the first call begins to count."""
    _count_steps()
    return STEPS.begun + 1


def buffers_of(owners: dict[int, object]) -> tuple[int, int, int]:
    """Bytes that owners of collectives have allocated: unsharded parameters, buffers of all-gathers, buffers of reductions.

    owners: as ``Listener.issued`` gets them, by any key; those that have nothing allocated are removed
    """
    unsharded = gathering = reducing = 0
    theirs: dict[int, tuple[int, int]] = {}
    for key, owner in list(owners.items()):
        before = unsharded + gathering + reducing
        if isinstance(owner, Reduction):
            reducing += owner.buffer_nbytes
        elif isinstance(owner, ParamGroup) and (made := owner.unsharded) is not None:
            unsharded += 0 if made.storage is None else made.storage.nbytes()
            gathering += 0 if owner.gathering is None else owner.gathering.buffer_nbytes
        elif torch_fsdp2.is_group(owner):
            found = {
                torch_tensors.address_of(each): (kind, each.nbytes()) for kind, each in torch_fsdp2.buffers(owner) if each.nbytes()
            }
            theirs |= found
            before -= bool(found)  # it has some
        if unsharded + gathering + reducing == before:
            del owners[key]
    more = [sum(nbytes for kind, nbytes in theirs.values() if kind == each) for each in range(3)]
    return unsharded + more[0], gathering + more[1], reducing + more[2]


def exchange(said: T, problem: FSDPError | None = None) -> list[T]:
    """What each rank of the job has ``said``, by rank. Collective: yes. Raises: the first rank's ``problem``, on every rank"""
    return agreement.agree(agreement.default_group(), problem, said)
