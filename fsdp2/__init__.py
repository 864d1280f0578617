"""fsdp2: an independent, DTensor-based ``fully_shard``."""

from .api import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
from .errors import (
    ArgumentError,
    DeviceError,
    FSDPError,
    MaterializationError,
    MeshError,
    ModuleError,
    OrderError,
    ParameterError,
)
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

__all__ = [
    "AllGather",
    "ArgumentError",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DeviceError",
    "FSDPError",
    "FSDPModule",
    "MaterializationError",
    "MeshError",
    "MixedPrecisionPolicy",
    "ModuleError",
    "OffloadPolicy",
    "OrderError",
    "ParameterError",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "fully_shard",
    "materialize",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
