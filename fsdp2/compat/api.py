"""The values that an FSDP1 script chooses: enums and dataclasses of ``torch.distributed.fsdp.api``, with their names and defaults.

Objects of torch's own classes are accepted wherever these are: enums are recognized by their names, dataclasses by their fields.

    MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    # reduce_dtype is None, so gradients are reduced in param_dtype, as FSDP1 does
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ArgumentError, got


class ShardingStrategy(Enum):
    """The tensors to shard, and over which ranks. ``_ZERO2``: parameters are kept from forward to backward."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When backward gathers the unit that comes next: before the gradients of this one are computed, or after."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Dtypes of one FSDP module.

    param_dtype:              of parameters in forward and backward; None: their own
    reduce_dtype:             of the gradient reduction; None: ``param_dtype``
    buffer_dtype:             to which floating-point buffers are cast, for good; state dicts have them in their own
    keep_low_precision_grads: ``grad`` is in ``param_dtype``, also if the reduction is in another dtype
    cast_forward_inputs:      cast floating-point inputs of forward to ``param_dtype``
    cast_root_forward_inputs: the same for the root, which casts if either is set
    _module_classes_to_ignore: with an ``auto_wrap_policy``, modules of these classes run in fp32, in units of their own; their
                              inputs are cast to fp32, and their outputs back
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """offload_params: sharded parameters, their gradients, and so the optimizer, live in host memory."""

    offload_params: bool = False


class StateDictType(Enum):
    """The form of an FSDP module's ``state_dict()``: whole tensors, or DTensors. LOCAL is the same as SHARDED here."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """offload_to_cpu: values are copied to host memory, one after another."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """rank0_only: the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """_use_dtensor: values are always DTensors here."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """offload_to_cpu: values are copied to host memory, one after another."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """rank0_only: the other ranks get an empty dict when saving; when loading, only rank 0 passes one."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """_use_dtensor: values are always DTensors here."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The settings that ``FSDP.set_state_dict_type`` returns, and takes back."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """Keys of an optimizer's state dict: names of parameters, or their numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


class FlatParameter(nn.Parameter):
    """The name alone, for ``isinstance`` checks, which are false: parameters are always the original ones."""


_Member = TypeVar("_Member", bound=Enum)


def member(kind: type[_Member], value: Any, argument: str) -> _Member:
    """``value`` as a member of ``kind``, also if it is torch's of the same name. Raises: ArgumentError."""
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__ and value.name in kind.__members__:
        return kind[value.name]
    raise ArgumentError(
        got("FSDP", argument, value),
        expected=f"a {kind.__name__}: {', '.join(kind.__members__)}",
        fix=f"for instance {argument}={next(iter(kind))}",
    )


__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
