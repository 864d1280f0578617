"""How the gradients of a group are reduced, as the user asked for it.

Setters replace the value as a whole; a reduction under way keeps the one that it started with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...policy import ReduceScatter


@dataclass(frozen=True)
class ReductionOptions:
    """How the gradients of a group are reduced.

    divide_factor:       what their sum over the ranks is divided by; None: the number of data-parallel ranks
    sum_only:            collectives only add; kernels of ours divide
    reduce_unused:       a parameter that no rank used gets a zero gradient instead of None
    grad_dtype:          of the sharded parameters' gradients; None: the parameters' own
    process_group:       of the reduce-scatter, if it has one of its own
    comm:                a custom communicator for the reduce-scatter
    all_reduce_instead:  changes the gradients in place, instead of the all-reduce
    all_reduce_hook:     changes what was reduced in place, on ``all_reduce_hook_stream`` or else where the reduction ran
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
