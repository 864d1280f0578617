"""The dtypes in which a group reduces, keeps and adds up gradients: by policy, and by ``grad_dtype`` of its parameters.

Worked example, torch 2.15's semantics: two bf16 parameters, no ``reduce_dtype``, the first one's ``grad_dtype`` fp32

    reduced in fp32; the first one's gradient stays fp32, the other's is cast to bf16
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...torch_names import torch_tensors
from .options import GroupOptions
from .param import ShardedParam


@dataclass(frozen=True)
class GradientDtypes:
    """The dtypes of one group's gradients.

    reduced:  the dtype in which they are reduced
    kept:     the dtype of each sharded parameter's gradient; None: all have the parameters' own
    added_up: ``grad_dtype`` of those unsharded parameters for which the user has set one
    usual:    the dtype in which the others add up gradients that a backward does not reduce
    """

    reduced: torch.dtype
    kept: dict[ShardedParam, torch.dtype] | None
    added_up: dict[ShardedParam, torch_tensors.GradDtype]
    usual: torch.dtype

    def added_up_in(self, param: ShardedParam) -> torch.dtype | None:
        """The dtype in which gradients of ``param`` are added up; None: in the dtype that they have."""
        of_user = self.added_up.get(param)
        return self.usual if of_user is None else of_user.dtype

    def of_unsharded(self, param: ShardedParam, adds_up: bool) -> torch_tensors.GradDtype | None:
        """``grad_dtype`` of the unsharded parameter; None: its own dtype. adds_up: several backwards add up there."""
        return torch_tensors.GradDtype(self.added_up_in(param)) if adds_up else self.added_up.get(param)


def gradient_dtypes(
    params: Sequence[ShardedParam], options: GroupOptions, dtype: torch.dtype, param_dtype: torch.dtype
) -> GradientDtypes:
    """Read them from the parameters as they are now. dtype: of the shards; param_dtype: of the computation."""
    given = options.reduce_dtype
    if options.semantics == "2.13":
        return GradientDtypes(given or param_dtype, None, {}, given or param_dtype)
    of_user = {param: found for param in params if (found := torch_tensors.grad_dtype_of(param.sharded)) is not None}
    wanted = [given or (dtype if param not in of_user else of_user[param].dtype or param_dtype) for param in params]
    reduced = functools.reduce(torch.promote_types, wanted)
    kept = {param: (of_user[param].dtype or reduced) if param in of_user else dtype for param in params}
    return GradientDtypes(
        reduced,
        None if all(each is dtype for each in kept.values()) else kept,
        of_user if given is None else dict.fromkeys(of_user, torch_tensors.GradDtype(given)),
        given or dtype,
    )
