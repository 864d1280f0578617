"""fsdp2: an independent, DTensor-based ``fully_shard``."""

from . import wrap
from .api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from .clip import clip_grad_norm_, get_total_norm
from .compiled import compile, uncompile  # noqa: A004 (named after torch.compile)
from .core.iteration.finalization import GradientReductionHandle
from .core.setup.semantics import set_semantics
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CompileError,
    DeviceError,
    FSDPError,
    LosingOrderWarning,
    MaterializationError,
    MeshError,
    ModuleError,
    NotAModuleError,
    OrderError,
    ParameterError,
)
from .fsdp_module import FSDPModule, UnshardHandle
from .materialize import materialize
from .policy import (
    AllGather,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
)
from .strategy import accumulate, parallelize

__all__ = [
    "AllGather",
    "ArgumentError",
    "ArgumentTypeError",
    "CPUOffloadPolicy",
    "CompileError",
    "DataParallelMeshDims",
    "DeviceError",
    "FSDPError",
    "FSDPModule",
    "GradientReductionHandle",
    "LosingOrderWarning",
    "MaterializationError",
    "MeshError",
    "MixedPrecisionPolicy",
    "ModuleError",
    "NotAModuleError",
    "OffloadPolicy",
    "OrderError",
    "ParameterError",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "accumulate",
    "clip_grad_norm_",
    "compile",
    "fully_shard",
    "get_total_norm",
    "materialize",
    "parallelize",
    "register_fsdp_forward_method",
    "set_semantics",
    "share_comm_ctx",
    "uncompile",
    "wrap",
]
