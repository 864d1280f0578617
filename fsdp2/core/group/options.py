"""The user's choices for a group: how it runs, how its gradients are reduced, and what the next backward does.

All three are frozen values. Setters, ``fsdp2.accumulate`` and ``no_sync`` replace a value as a whole and put the old
one back; a reduction under way keeps the values that it started with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...policy import ReduceScatter
from ..comm import backends


@dataclass(frozen=True)
class GroupOptions:
    """How a group runs; the last four are private, for tests and benchmarks: measurement picks their defaults.

    mp_policy:            as the user gave it, for all-gather extensions
    semantics:            the version of FSDP2 whose numbers it gives, torch 2.13's or 2.15's (``fsdp2/semantics.py``)
    offload, pin_memory:  keep the flat shard and gradients in (page-locked) host memory
    folder, read_ahead:   with ``offload``, keep the flat shard in a file there (gathers send page-locked copies of it),
                          and how many groups' files are read before their turn
    block:                elements that an optimizer quantizes together: none of them may belong to two parameters
    gather:               "auto", "direct", "packed" or "mixed"
    all_gather, reduce_scatter, all_reduce: the collective algorithm; None: ``backends`` chooses
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    pin_memory: bool = False
    folder: str | None = None
    read_ahead: int = 0
    block: int = 1
    mp_policy: Any = None
    semantics: Literal["2.13", "2.15"] = "2.13"
    gather: str = "auto"
    all_gather: backends.AllGatherAlgorithm | None = None
    reduce_scatter: backends.ReduceScatterAlgorithm | None = None
    all_reduce: backends.AllReduceAlgorithm | None = None


@dataclass(frozen=True)
class ReductionOptions:
    """How the gradients of a group are reduced.

    divide_factor:       divisor of their sum over the ranks; None: the number of data-parallel ranks
    sum_only:            collectives only add; our own kernels divide
    reduce_unused:       a parameter that no rank used gets a zero gradient instead of None
    grad_dtype:          of the sharded parameters' gradients; None: the parameters' own
    process_group:       of the reduce-scatter, if it has its own
    comm:                a custom communicator for the reduce-scatter
    all_reduce_instead:  a function that changes the gradients in place, instead of the all-reduce
    all_reduce_hook:     changes reduced gradients in place, on ``all_reduce_hook_stream``, else where the reduction ran
    """

    divide_factor: float | None = None
    sum_only: bool = False
    reduce_unused: bool = False
    grad_dtype: torch.dtype | None = None
    process_group: dist.ProcessGroup | None = None
    comm: ReduceScatter | None = None
    all_reduce_instead: Callable[[Tensor], None] | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    all_reduce_hook_stream: Any = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The switches of one unit for its next backward; the defaults are those of a step's only backward.

    reduces:             gradients are reduced over the shard axis; else they accumulate whole, in reduce dtype
    all_reduces:         then they are all-reduced over the replicate axis; else they accumulate reduce-scattered
    accumulates_shards:  ``all_reduces`` False keeps reduce-scattered gradients even without a replicate axis
    reshards:            parameters are resharded after backward
    reshards_to_smaller: ... but only to each group's ``smaller`` mesh
    contributes:         False: this rank's gradients are dropped, as if it had used no parameter
    """

    reduces: bool = True
    all_reduces: bool = True
    accumulates_shards: bool = False
    reshards: bool = True
    reshards_to_smaller: bool = False
    contributes: bool = True
