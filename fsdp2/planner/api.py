"""``fsdp2.plan``: turns its arguments into a workload and a setting, and their rehearsal into a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import COUNT, DTYPE, FUNCTION, NATURAL, require
from ..errors import ArgumentError, got
from ..testing.clock.cards import CARDS, Card
from .duration import duration_of
from .memory import memory_of, visits_of
from .rehearsal import Optimizer, Setting, rehearse, wrapping_of
from .repetition import Figures, NotAlikeError, a_group_grows, fewer_blocks, figures_of_many, figures_of_more
from .result import LargeRoot, Plan
from .tiers import OFFLOADS, Offload
from .traffic import traffic_of
from .workload import Workload, workload_of
from .world import Backend

_ROOT_SHARE = 0.5
"""A root that holds more of the parameters than this is planned again with automatic wrapping, to say what that would save."""


def plan(
    model: nn.Module | Workload,
    world_size: int,
    strategy: str = "zero3",
    *,
    shard_size: int | None = None,
    wrap: Any = "auto",
    dtype: torch.dtype | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    optimizer: str | Optimizer = "adamw",
    batch: int = 1,
    sequence: int = 2048,
    micro_batches: int = 1,
    checkpointing: Any = "none",
    offload: Offload = False,
    prefetch: int = 1,
    backend: Backend = "nccl",
    ranks_per_host: int = 8,
    card: str | Card | None = None,
    inputs: Callable[[int, int], tuple[Any, ...]] | None = None,
    loss: Callable[[Any, tuple[Any, ...]], Tensor] | None = None,
) -> Plan:
    """The needs of a rank of ``world_size`` to train ``model``: bytes, where their peak is, what is communicated.

    The library's own code is run on tensors without memory: sharding, two steps of forward, backward and optimizer. ``model`` is not
    changed, and its values are not read; nothing is allocated, and no accelerator and no process group are needed (or touched).

    strategy, shard_size, wrap: as in ``parallelize``
    dtype:          in which parameters are stored, None: as ``model`` has them; param_dtype, reduce_dtype: as in MixedPrecisionPolicy
    optimizer:      "adamw", "adam", "sgd", or a function from parameters to an optimizer
    batch, sequence: of one micro-batch of one rank
    checkpointing:  "none", or a policy of ``apply_activation_checkpointing``: "full" computes each repeated block again in backward;
                    "selective" as well, but for matrix products and attention (``save_ops=HEAVY_OPS``)
    offload:        True: as CPUOffloadPolicy, sharded parameters, gradients and optimizer state are kept in host memory;
                    "optimizer": as ``offloaded(..., CPUOffloadPolicy())``, the state alone;
                    "optimizer-disk", "disk": as ``offloaded`` with a DiskOffloadPolicy, the state is kept in files; and the parameters
                    as well, whose gradients are on the host
    micro_batches:  forwards and backwards before a step of the optimizer
    prefetch:       units that are gathered ahead
    backend:        whose algorithms and schedule: "nccl" for accelerators, "gloo" for the CPU
    ranks_per_host: consecutive ranks that share a host, for the traffic between hosts
    card:           "a100-40gb", "a100-80gb", "h100", "h200", or a ``fsdp2.testing.clock.cards.Card``: how long a step takes, by a model
    inputs:         from batch and sequence, a tuple of what the model is called with; None: numbers of words, (batch, sequence)
    loss:           from what the model returns, and that tuple; None: cross entropy of logits, or the mean of anything else
    Returns:        a ``fsdp2.planner.result.Plan``; print it
    Collective:     no
    Raises:         an FSDPError for wrong arguments; what the model raises where its Python depends on values of tensors

    Example:
        planned = fsdp2.plan(net, 64, "zero3", batch=8, inputs=lambda batch, sequence: (torch.randn(batch, 16),))
        planned.memory.peak.nbytes
    """
    require(
        "plan", COUNT, world_size=world_size, batch=batch, sequence=sequence, micro_batches=micro_batches, ranks_per_host=ranks_per_host
    )
    require("plan", NATURAL, prefetch=prefetch)
    require("plan", DTYPE.or_none, dtype=dtype, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    require("plan", FUNCTION.or_none, inputs=inputs, loss=loss)
    if not isinstance(optimizer, str):
        require("plan", FUNCTION, optimizer=optimizer)
    if backend not in ("nccl", "gloo"):
        raise ArgumentError(got("plan", "backend", backend), expected='"nccl" or "gloo"', fix='backend="gloo" for the CPU')
    if offload not in OFFLOADS:
        raise ArgumentError(got("plan", "offload", offload), expected=f"one of {list(OFFLOADS)}", fix='offload="optimizer"')
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
    )
    return plan_of(workload, setting, ranks_per_host, card)


def plan_of(
    workload: Workload,
    setting: Setting,
    ranks_per_host: int = 8,
    card: str | Card | None = None,
    is_of_interest: Callable[[Plan], bool] | None = None,
) -> Plan:
    """The same from values.

    is_of_interest: a plan from two rehearsals with few blocks is returned without the check by a third where this says so; None: check
    """
    planned = _planned(workload, setting, ranks_per_host, card, is_of_interest)
    root = sum(group.numel for group in planned.groups if not group.name)
    if is_of_interest is None and setting.wrap != "auto" and root > _ROOT_SHARE * planned.numel:
        other = _planned(workload, replace(setting, wrap="auto"), ranks_per_host, card, None)
        if other.memory.peak.nbytes < planned.memory.peak.nbytes:
            return replace(planned, large_root=LargeRoot(root / planned.numel, other.memory.peak.nbytes))
    return planned


def _planned(
    workload: Workload,
    setting: Setting,
    ranks_per_host: int,
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
        )

    fewer = fewer_blocks(workload, setting.prefetch, setting.offload in (True, "disk"))
    if fewer is not None:
        few, more, most = (partial(_rehearsed_figures, each, setting, ranks_per_host, chosen) for each in fewer.workloads)
        with contextlib.suppress(NotAlikeError):
            small, middle = few(), more()
            if is_of_interest is not None:
                unchecked = plan_from(figures_of_more(small, middle, workload.repeated, fewer.times + 1))
                if not is_of_interest(unchecked):
                    return unchecked
            if a_group_grows(small, middle):
                raise NotAlikeError
            return plan_from(figures_of_many((small, middle, most()), workload.repeated, fewer.times))
    return plan_from(_rehearsed_figures(workload, setting, ranks_per_host, chosen))


def _rehearsed_figures(workload: Workload, setting: Setting, ranks_per_host: int, card: Card | None) -> Figures:
    rehearsed = rehearse(workload, setting)
    return Figures(
        numel=rehearsed.numel,
        state=rehearsed.state,
        groups=rehearsed.groups,
        visits=visits_of(rehearsed.before, rehearsed.blocks, rehearsed.entries, rehearsed.unit_of_node),
        traffic=traffic_of(rehearsed.entries, rehearsed.process_groups, ranks_per_host),
        duration=None if card is None else duration_of(rehearsed.entries, rehearsed.process_groups, card),
        files=rehearsed.files,
    )


def card_of(card: Any, setting: Setting) -> Card | None:
    """Raises: ArgumentError for what is no card, and for one with the schedule of a CPU"""
    if isinstance(card, str) and card in CARDS:
        card = CARDS[card]
    if not isinstance(card, (Card, type(None))) or (card is not None and setting.backend != "nccl"):
        raise ArgumentError(
            f"plan got card={card!r} with backend={setting.backend!r}",
            expected=f"one of {list(CARDS)}, a Card or None, and the schedule of an accelerator",
            fix='card="h100", with backend="nccl"',
        )
    return card
