"""FSDP1's names on our own core: an FSDP1 script runs with only the module of its import lines changed.

    from fsdp2.compat import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, StateDictType
    from fsdp2.compat import transformer_auto_wrap_policy          # was torch.distributed.fsdp.wrap

Every public name of FSDP1 in ``torch.distributed.fsdp`` and its modules ``api``, ``wrap``, ``fully_sharded_data_parallel`` and
``sharded_grad_scaler`` is here, and the modules are here as well. So are the names of FSDP2 that stand next to them there.
docs/fsdp1.md says what each argument does, what is refused and why, and what differs.
"""

from .. import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from . import api
from .api import *  # noqa: F403
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .sharded_grad_scaler import ShardedGradScaler
from .wrap import (  # ``wrap`` is the function here, as the last to be bound; ``fsdp2.compat.wrap`` can be imported from all the same
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _Policy,
    always_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "CPUOffloadPolicy",
    "CustomPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "ShardedGradScaler",
    "UnshardHandle",
    "_Policy",
    "_or_policy",
    "always_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
__all__ += api.__all__
