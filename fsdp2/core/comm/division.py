"""Who divides the gradients, and by what: before, inside or after the collectives of a reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .backends import averages


@dataclass(frozen=True, slots=True)
class Division:
    """How to reduce: divide the input in place, sum (or average) over the ranks, divide the output in place."""

    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM  # SUM or AVG
    predivide: float | None = None
    postdivide: float | None = None


SUM = Division()
_AVG = Division(op=dist.ReduceOp.AVG)


@dataclass(frozen=True, slots=True)
class Divisions:
    """The reductions of the two legs of one gradient; together they divide once."""

    reduce_scatter: Division
    all_reduce: Division


def divisions_for(
    shard_ranks: int,
    replicate_ranks: int,
    reduce_dtype: torch.dtype,
    backend: str,
    divide_factor: float | None = None,
    sum_only: bool = False,
    all_reduce_backend: str = "",
) -> Divisions:
    """Divide by ``divide_factor`` (by default all data-parallel ranks) over reduce-scatter and all-reduce together.

    backend:            of the reduce-scatter
    all_reduce_backend: of the all-reduce; "": the same

    A leg of one rank communicates nothing; it divides only where both legs have one rank. Examples:

        (4, 1, fp32, "nccl")      AVG;           -
        (4, 2, fp32, "nccl")      AVG;           AVG
        (4, 2, fp32, "nccl", 6)   SUM;           SUM, / 6
        (3, 1, bf16, "nccl")      SUM, / 3;      -            (AVG would multiply by 1/3 in bf16: 0.2 % too much)
        (4, 2, fp32, "nccl" and "gloo")  AVG;    SUM, / 2
        (4, 2, bf16, "gloo")      SUM;           SUM, / 8     (the output: it is the smallest buffer)
        (4, 1, fp16, any)         / 2, SUM, / 2; -
        (4, 2, fp16, any)         / 4, SUM;      SUM, / 2
    """
    total_ranks = shard_ranks * replicate_ranks
    between = all_reduce_backend or backend
    factor = float(total_ranks if divide_factor is None else divide_factor)
    predivide: float | None = None
    postdivide: float | None = factor
    if reduce_dtype == torch.float16:
        # fp16 overflows at 65504 and underflows at 6e-8: divide by about sqrt before, by the rest after. A power of two
        # costs no bits.
        if factor > 1:
            predivide = 2.0 ** math.ceil(math.log2(factor) / 2)
            postdivide = factor / predivide
    elif (
        averages(backend if shard_ranks > 1 else between) and _averages_well(reduce_dtype, total_ranks) and not sum_only
    ):
        # Division inside the collective costs no kernel. See Note: what NCCL computes, also on PREMUL_SUM.
        if divide_factor is None:
            all_reduce = _AVG if averages(between) else Division(postdivide=replicate_ranks)
            return Divisions(_AVG if shard_ranks > 1 else SUM, all_reduce if replicate_ranks > 1 else SUM)
        if factor == shard_ranks:
            return Divisions(_AVG if shard_ranks > 1 else SUM, SUM)
    if postdivide == 1:
        postdivide = None
    if replicate_ranks == 1:
        return Divisions(Division(predivide=predivide, postdivide=postdivide), SUM)
    if shard_ranks == 1:
        return Divisions(SUM, Division(predivide=predivide, postdivide=postdivide))
    return Divisions(Division(predivide=predivide), Division(postdivide=postdivide))


def _averages_well(dtype: torch.dtype, num_ranks: int) -> bool:
    """Whether AVG is as exact as a divided sum: NCCL rounds 1 / ranks to ``dtype`` and multiplies each input by it."""
    return num_ranks > 1 and (dtype.itemsize >= 4 or num_ranks.bit_count() == 1)
