"""Strategies: what each rank keeps of parameters, gradients and optimizer state. ``parallelize`` takes a strategy by its name.

W ranks, S of them on a node; bytes a rank keeps per parameter, with bf16 compute, fp32 master and AdamW; r is the itemsize of the
reduce dtype, in which gradients accumulate over micro-batches:

    strategy        compute copy        gradients       master      Adam
    ddp             2  resident         r               4           8
    zero1           2  resident         r               4/W         8/W
    zero2           2  resident         r/W             4/W         8/W
    zero3           2  transient        r/W             4/W         8/W
    hsdp            2  transient        r/S             4/S         8/S
    hsdp_zero2      2  resident         r/S             4/S         8/S
    hsdp_global     2/S resident        r/W             4/W         8/W

*Resident*: from the first forward after an optimizer step to the end of the last backward before the next one, at which the
optimizer sees sharded DTensors in every strategy, so that a plain ``AdamW(model.parameters())`` shards its state. (``accumulate``
tells micro-batches apart; without it every backward is the last one.) *Transient*: group by group, while the group runs.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..api import fully_shard
from ..arguments import SWITCH, require
from ..core.group.options import MicroBatch
from ..core.iteration.module_state import ModuleState, unit_of, units_in
from ..core.plan.mesh import checked_mesh, device_of, read_mesh
from ..core.setup.build import read_modules
from ..errors import ArgumentError, ModuleError, got_object
from ..fsdp_module import FSDPModule
from ..grouping.planning import plan
from ..grouping.policies import Wrap
from ..optimizer_steps import STEPS
from ..policy import MixedPrecisionPolicy, OffloadPolicy
from ..sharded_class import sharded_class
from ..sharding_arguments import check_policies, checked_modules
from .meshes import flat_mesh, flat_mesh_of_nodes, node_mesh, replicated_mesh
from .same_start import broadcast, described, free_tensors, require_same

_Module = TypeVar("_Module", bound=nn.Module)

Over = Literal["world", "node", "nobody"]
StrategyName = Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2", "hsdp_global"]


@dataclass(frozen=True)
class Strategy:
    """What is sharded over which ranks: over all ranks, over those of a node, or not at all.

    parameters:  the unsharded parameters between a unit's uses: sharded again ("world", "node"), or kept whole ("nobody")
    gradients:   while they accumulate over micro-batches
    optimizer:   the parameters that the optimizer sees, and so its state
    """

    name: str
    parameters: Over
    gradients: Over
    optimizer: Over

    @property
    def is_hybrid(self) -> bool:
        return "node" in (self.parameters, self.gradients, self.optimizer)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp", "nobody", "nobody", "nobody"),
        Strategy("zero1", "nobody", "nobody", "world"),
        Strategy("zero2", "nobody", "world", "world"),
        Strategy("zero3", "world", "world", "world"),
        Strategy("hsdp", "node", "node", "node"),
        Strategy("hsdp_zero2", "nobody", "node", "node"),
        Strategy("hsdp_global", "node", "world", "world"),
    )
}
"""The strategies by the name that ``parallelize`` takes."""

_ELSEWHERE = {
    "fsdp": "zero3",
    "fsdp2": "zero3",
    "fully_shard": "zero3",
    "full_shard": "zero3",
    "shard_grad_op": "zero2",
    "no_shard": "ddp",
    "replicate": "ddp",
    "hybrid_shard": "hsdp",
    "hybrid_shard_zero2": "hsdp_zero2",
}
"""Our names by those of torch and FSDP1: "fsdp" looks most like "hsdp", which is another strategy."""


def parallelize(
    model: _Module,
    strategy: StrategyName = "zero3",
    *,
    wrap: Wrap = "auto",
    mesh: DeviceMesh | None = None,
    shard_size: int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (a frozen value)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    sync_module_states: bool = True,
) -> _Module:
    """Apply data parallelism to a whole model, in place: ``fully_shard`` on the groups that ``wrap`` chooses, last on ``model``.

    strategy:       "ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2" or "hsdp_global"; the strategies page compares them.
                    "hsdp_global" shards gradients and optimizer state over all ranks, and parameters within a node: they are gathered
                    over all ranks once a step, at its first forward, and over the ranks of a node from then on.
    wrap:           which modules become groups: "auto", None (the model alone), module classes, or a policy of ``fsdp2.wrap``
    mesh:           1-D, of all data-parallel ranks, or for hybrid strategies 2-D (nodes, ranks of a node); None: all ranks
    shard_size:     ranks of a node for hybrid strategies, consecutive ones; None: of a 2-D mesh its last axis, else LOCAL_WORLD_SIZE
    mp_policy, offload_policy, ignored_params, shard_placement_fn: as in ``fully_shard``
    sync_module_states: first broadcast parameters and buffers of the first rank, as DDP does, but for what is on the meta device
    Returns:        ``model``, now of class ``FSDP<Name>``; every method of FSDPModule works
    Collective:     yes, over all ranks: it may make process groups, and broadcasts
    Raises:         an FSDPError for a wrong argument, before anything is changed; ModuleError on every rank if their models differ
    Source:         ZeRO (Rajbhandari et al. 2020); hsdp_global: ZeRO++'s hpZ (Wang et al. 2023)

    Example:
        fsdp2.parallelize(net, "zero2")
        net(x).sum().backward()
    """
    chosen = _strategy(strategy)
    _check_model(model)
    require("parallelize", SWITCH, sync_module_states=sync_module_states)
    offload_policy = OffloadPolicy() if offload_policy is None else offload_policy
    check_policies(mp_policy, offload_policy, ignored_params)
    ignored = ignored_params or set()
    planned = plan(model, wrap, ignored_params=ignored)
    ranks = checked_mesh(mesh, "parallelize") if mesh is not None else flat_mesh(chosen.name, None)
    tensors = free_tensors(model, ignored)
    dtypes = mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype
    arguments = f"strategy={chosen.name!r}, shard_size={shard_size}, sync_module_states={sync_module_states}, dtypes {dtypes}"
    facts = [f"{arguments}, {type(offload_policy).__name__}", *described(tensors)]
    facts += [f"group {group.names} {type(group.modules[0]).__name__}" for group in planned.groups]
    require_same(ranks, facts, f"models, or arguments of parallelize({chosen.name!r}),")
    mesh, reshard_after_forward = _placed(chosen, mesh, shard_size)
    # Check first what a call below would refuse for its group: by then the groups before it would have been sharded.
    read_modules([model], read_mesh(mesh), shard_placement_fn, ignored)
    for module in (module for group in planned.groups for module in group.modules):
        sharded_class(module, FSDPModule)
    if sync_module_states:
        broadcast(ranks, device_of(ranks), tensors)
    for group in planned.groups:
        fully_shard(
            list(group.modules),
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored,
        )
        unit = unit_of(group.modules[0])
        if unit is not None:  # else fully_shard is the reference's, which shards nothing
            unit.choose(accumulates_whole=chosen.gradients == "nobody")
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModuleError(
            got_object("parallelize", model),
            expected="one nn.Module; wrap= chooses the modules inside of it that become groups",
            fix="pass the model itself",
        )
    checked_modules(model)


def _strategy(name: Any) -> Strategy:
    if isinstance(name, str) and name in STRATEGIES:
        return STRATEGIES[name]
    said = str(name).lower().rpartition(".")[2].strip("_")  # ShardingStrategy.FULL_SHARD is FSDP1's
    close = [_ELSEWHERE[said]] if said in _ELSEWHERE else difflib.get_close_matches(said, STRATEGIES, n=1)
    raise ArgumentError(
        f"parallelize got strategy={name!r}",
        expected=f"one of {list(STRATEGIES)}",
        fix=f"strategy={close[0]!r}" if close else "docs/strategies.md lists the bytes that each keeps on a rank",
    )


def _placed(strategy: Strategy, mesh: DeviceMesh | None, shard_size: int | None) -> tuple[DeviceMesh, bool | int | None]:
    """The mesh, and ``reshard_after_forward`` for ``fully_shard``. Collective: where it makes process groups."""
    name = strategy.name
    if shard_size is not None and not strategy.is_hybrid:
        hybrid = [each.name for each in STRATEGIES.values() if each.is_hybrid]
        raise ArgumentError(
            f"strategy {name!r} got shard_size={shard_size}",
            expected=f"shard_size with a hybrid strategy only: {hybrid}",
            fix="leave it out, or choose one of these",
        )
    after = False if strategy.parameters == "nobody" else None
    if strategy.optimizer == "nobody":
        return replicated_mesh(name, mesh), after
    if strategy.optimizer == "node":
        return node_mesh(name, mesh, shard_size), after
    if strategy.parameters == "node":
        return flat_mesh_of_nodes(name, mesh, shard_size)
    return flat_mesh(name, mesh), after


@contextlib.contextmanager
def accumulate(model: nn.Module, last: bool = False) -> Iterator[None]:
    """Around forward and backward of one micro-batch, when the optimizer steps only after several; the same in every strategy.

    In micro-batches that are not the last, gradients stay with fsdp2 in ``reduce_dtype``, and ``param.grad`` is as it was before:
    ddp and zero1 add up whole gradients without communication; the others reduce-scatter each micro-batch and add up shards (hsdp
    and hsdp_zero2 all-reduce between nodes only in the last). Parameters that the strategy keeps are kept from one to the next.

    last:       True: this is the micro-batch after which the optimizer steps. What was added up is reduced with it. An optimizer
                that steps before raises OrderError.
    Collective: no by itself; all ranks must pass the same.
    Raises:     ModuleError if ``model`` is not sharded.

    Example:
        for index, batch in enumerate(x.chunk(2)):
            with fsdp2.accumulate(model, last=index == 1):
                (model(batch).mean() / 2).backward()
        optimizer.step()
    """
    units = sharded_units("accumulate", model)
    require("accumulate", SWITCH, last=last)
    with contextlib.nullcontext() if last else accumulating(units):
        yield


@contextlib.contextmanager
def accumulating(units: Sequence[ModuleState]) -> Iterator[None]:
    """Around a micro-batch that is not the last: see ``accumulate``. Collective: no"""
    before = [unit.micro_batch for unit in units]
    for unit in units:
        usual = unit.micro_batch
        unit.set_micro_batch(
            MicroBatch(
                reduces=usual.reduces and not unit.options.accumulates_whole,
                all_reduces=False,
                accumulates_shards=True,
                reshards=usual.reshards and unit.options.reshard_after_forward is not False,
                reshards_to_smaller=any(group.smaller_mesh is not None for group in unit.groups),
            )
        )
    try:
        yield
    finally:
        for unit, usual in zip(units, before, strict=True):
            unit.set_micro_batch(usual)
        STEPS.waiting.update(group.gradients for unit in units for group in unit.groups if group.gradients.has_unreduced)


def sharded_units(caller: str, model: Any) -> list[ModuleState]:
    """The units in ``model``. Raises: ModuleError, in the name of ``caller``, if there are none"""
    units = units_in(model.modules() if isinstance(model, nn.Module) else ())
    if not units:
        raise ModuleError(
            f"{caller} got a {type(model).__name__} that is not sharded",
            expected="a model that parallelize or fully_shard was called on",
            fix="call fsdp2.parallelize(model, ...) first",
        )
    return units
