"""``fsdp2.plan``: turns its arguments into a workload and a setting, and their rehearsal into a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import FUNCTION, require
from ..errors import ArgumentError, ModuleError
from ..grouping.policies import Wrap
from ..strategy import StrategyName
from ..testing.clock.cards import CARDS, Card
from .card_file import card_named
from .duration import duration_of
from .memory import memory_of, visits_of
from .rehearsal import rehearse, wrapping_of
from .repetition import (
    MICRO_BATCHES,
    Figures,
    NotAlikeError,
    a_group_grows,
    fewer_blocks,
    figures_of_many,
    figures_of_more,
    middle_of,
    with_middle_repeated,
)
from .result import METHODS, LargeRoot, Plan
from .setting import Optimizer, OptimizerName, Setting
from .tiers import Offload
from .traffic import traffic_of
from .workload import Workload, workload_of
from .world import Backend

_ROOT_SHARE = 0.5
"""A root that holds more of the parameters than this is planned again with automatic wrapping, to say what that would save."""


def plan(
    model: nn.Module | Workload,
    world_size: int,
    strategy: StrategyName = Setting.strategy,
    *,
    shard_size: int | None = Setting.shard_size,
    wrap: Wrap = Setting.wrap,
    dtype: torch.dtype | None = Setting.dtype,
    param_dtype: torch.dtype | None = Setting.param_dtype,
    reduce_dtype: torch.dtype | None = Setting.reduce_dtype,
    optimizer: OptimizerName | Optimizer = Setting.optimizer,
    batch: int = Setting.batch,
    sequence: int = Setting.sequence,
    micro_batches: int = Setting.micro_batches,
    checkpointing: Any = Setting.checkpointing,
    offload: Offload = Setting.offload,
    prefetch: int = Setting.prefetch,
    backend: Backend = Setting.backend,
    ranks_per_host: int = Setting.ranks_per_host,
    card: str | Card | None = None,
    inputs: Callable[[int, int], tuple[Any, ...]] | None = None,
    loss: Callable[[Any, tuple[Any, ...]], Tensor] | None = None,
) -> Plan:
    """Plan what each of ``world_size`` ranks needs to train ``model``: memory, where its peak is, communication.

    Rehearses sharding and two steps of forward, backward and optimizer with the library's own code, on tensors without memory. Reads
    and changes no values of ``model``; needs no accelerator and no process group, and touches none.

    strategy, shard_size, wrap: as in ``parallelize``; the default of ``shard_size`` is ``ranks_per_host``
    dtype:          dtype in which parameters are stored; None: as in ``model``
    param_dtype, reduce_dtype: as in MixedPrecisionPolicy
    optimizer:      "adamw", "adam", "sgd", or a function from parameters to an optimizer
    batch, sequence: shape of one micro-batch of one rank
    checkpointing:  "none", or a policy of ``apply_activation_checkpointing``: "full" recomputes each repeated block in backward;
                    "selective" all of it but matrix products and attention (``save_ops=HEAVY_OPS``)
    offload:        True: parameters, gradients and optimizer state in host memory (CPUOffloadPolicy);
                    "optimizer": only the optimizer state (``offloaded(..., CPUOffloadPolicy())``);
                    "optimizer-disk": the optimizer state in files (``offloaded(..., DiskOffloadPolicy(path))``);
                    "disk": the parameters in files as well, and gradients in host memory
    micro_batches:  forwards and backwards before each optimizer step
    prefetch:       number of units gathered ahead
    backend:        "nccl" plans the algorithms and the schedule for accelerators, "gloo" those for the CPU
    ranks_per_host: consecutive ranks that share a host
    card:           the name of a GPU ("a100-80gb", "h100", "b200", ...: ``fsdp2.testing.clock.cards.CARDS``), a file that
                    ``fsdp2 measure`` wrote, or a ``Card``: also predicts the time of a step, by a model
    inputs:         function from batch and sequence to the tuple of the model's arguments; None: token ids (batch, sequence)
    loss:           function from the model's output and that tuple to a number; None: cross entropy of logits, or the mean of any
                    other output
    Returns:        a ``fsdp2.planner.result.Plan``; print it
    Collective:     no
    Raises:         an FSDPError for wrong arguments, and for a model whose Python code depends on values of tensors

    Example:
        planned = fsdp2.plan(net, 64, "zero3", batch=8, inputs=lambda batch, sequence: (torch.randn(batch, 16),))
        planned.memory.peak.nbytes
    """
    require("plan", FUNCTION.or_none, inputs=inputs, loss=loss)
    workload = model if isinstance(model, Workload) else workload_of(model, inputs, loss)
    setting = Setting(
        world_size=world_size,
        strategy=strategy,
        shard_size=shard_size,
        wrap=wrap,
        dtype=dtype,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        batch=batch,
        sequence=sequence,
        micro_batches=micro_batches,
        checkpointing=checkpointing,
        offload=offload,
        prefetch=prefetch,
        backend=backend,
        ranks_per_host=ranks_per_host,
    )
    return plan_of(workload, setting, card)


def plan_of(
    workload: Workload,
    setting: Setting,
    card: str | Card | None = None,
    is_of_interest: Callable[[Plan], bool] | None = None,
) -> Plan:
    """The same from a workload and a setting.

    is_of_interest: if it is False for a plan from two rehearsals with few blocks, that plan is returned without the check by a third
    """
    planned = _planned(workload, setting, card, is_of_interest)
    root = sum(group.numel for group in planned.groups if not group.name)
    if is_of_interest is None and setting.wrap != "auto" and root > _ROOT_SHARE * planned.numel:
        with contextlib.suppress(ModuleError):  # the root may use parameters of its children, which need its forward then
            other = _planned(workload, replace(setting, wrap="auto"), card, None)
            if other.memory.peak.nbytes < planned.memory.peak.nbytes:
                return replace(planned, large_root=LargeRoot(root / planned.numel, other.memory.peak.nbytes))
    return planned


def _planned(
    workload: Workload,
    setting: Setting,
    card: str | Card | None,
    is_of_interest: Callable[[Plan], bool] | None,
) -> Plan:
    chosen = card_of(card, setting)
    wrapping = str(wrapping_of(workload, setting))

    def plan_from(figures: Figures) -> Plan:
        return Plan(
            name=workload.name,
            setting=setting,
            numel=figures.numel,
            state=figures.state,
            groups=figures.groups,
            memory=memory_of(figures.visits, figures.files),
            traffic=figures.traffic,
            wrapping=wrapping,
            duration=figures.duration,
            methods=METHODS if chosen is None or not chosen.is_measured else METHODS | {"duration": "modeled, measured rates"},
        )

    fewer = fewer_blocks(workload, setting.prefetch, setting.offload in (True, "disk"))
    if fewer is not None:
        few, more, most = (partial(_rehearsed_figures, each, setting, chosen) for each in fewer.workloads)
        with contextlib.suppress(NotAlikeError):
            small, middle = few(), more()
            if is_of_interest is not None:
                unchecked = plan_from(figures_of_more(small, middle, workload.repeated, fewer.times + 1))
                if not is_of_interest(unchecked):
                    return unchecked
            if a_group_grows(small, middle):
                raise NotAlikeError
            return plan_from(figures_of_many((small, middle, most()), workload.repeated, fewer.times))
    return plan_from(_rehearsed_figures(workload, setting, chosen))


def _rehearsed_figures(workload: Workload, setting: Setting, card: Card | None) -> Figures:
    few = min(setting.micro_batches, MICRO_BATCHES)
    rehearsed, times = rehearse(workload, replace(setting, micro_batches=few)), setting.micro_batches - few
    entries, middle = rehearsed.entries, middle_of(rehearsed.entries)
    visits = visits_of(rehearsed.before, rehearsed.blocks, entries, rehearsed.unit_of_node)
    communicated = [*entries[: middle.stop], *entries[middle] * times, *entries[middle.stop :]]
    return Figures(
        numel=rehearsed.numel,
        state=rehearsed.state,
        groups=rehearsed.groups,
        visits=with_middle_repeated(visits, times),
        traffic=traffic_of(communicated, rehearsed.process_groups, setting.ranks_per_host),
        duration=None if card is None else duration_of(entries, rehearsed.process_groups, card, middle, times),
        files=rehearsed.files,
    )


def card_of(card: Any, setting: Setting) -> Card | None:
    """Raises: ArgumentError unless ``card`` is a card, its name or None, and for a card with the schedule of the CPU"""
    if isinstance(card, str):
        card = card_named(card)
    if not isinstance(card, (Card, type(None))) or (card is not None and setting.backend != "nccl"):
        raise ArgumentError(
            f"plan got card={card!r} with backend={setting.backend!r}",
            expected=f"one of {list(CARDS)}, a Card or None, and the schedule of an accelerator",
            fix='card="h100", with backend="nccl"',
        )
    return card
