"""fsdp2: an independent, DTensor-based ``fully_shard``.

What a program that only shards does not need is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from .clip import clip_grad_norm_, get_total_norm
from .core.comm.backends import set_collective_algorithms
from .core.iteration.finalization import GradientReductionHandle
from .core.setup.semantics import set_semantics
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CompileError,
    DeviceError,
    DoctorError,
    DoctorWarning,
    ExtensionError,
    FSDPError,
    LosingOrderWarning,
    LostRankError,
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
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
)
from .strategy import accumulate, parallelize

if TYPE_CHECKING:
    from . import activations, checkpoint, compat, doctor, optim, state_bytes, wrap
    from .activations import ActivationCheckpointPolicy, apply_activation_checkpointing, apply_activation_offload
    from .compiled import compile, uncompile  # noqa: A004 (named after torch.compile)
    from .hangs.lookout import set_missing_rank_timeout
    from .hangs.watcher import watchdog
    from .inspector.ledger_file import ledger
    from .inspector.record_file import record
    from .inspector.trace_file import trace
    from .installation import install, uninstall
    from .model_summary import summary
    from .planner.api import plan

_MODULES = ("activations", "checkpoint", "compat", "doctor", "optim", "state_bytes", "wrap")
_ELSEWHERE = {
    "ActivationCheckpointPolicy": "activations",
    "apply_activation_checkpointing": "activations",
    "apply_activation_offload": "activations",
    "compile": "compiled",
    "install": "installation",
    "ledger": "inspector.ledger_file",
    "plan": "planner.api",
    "set_missing_rank_timeout": "hangs.lookout",
    "summary": "model_summary",
    "record": "inspector.record_file",
    "trace": "inspector.trace_file",
    "uncompile": "compiled",
    "uninstall": "installation",
    "watchdog": "hangs.watcher",
}

__all__ = [
    "ActivationCheckpointPolicy",
    "AllGather",
    "ArgumentError",
    "ArgumentTypeError",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CompileError",
    "DataParallelMeshDims",
    "DeviceError",
    "DiskOffloadPolicy",
    "DoctorError",
    "DoctorWarning",
    "ExtensionError",
    "FSDPError",
    "FSDPModule",
    "GradientReductionHandle",
    "LosingOrderWarning",
    "LostRankError",
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
    "activations",
    "apply_activation_checkpointing",
    "apply_activation_offload",
    "checkpoint",
    "clip_grad_norm_",
    "compat",
    "compile",
    "doctor",
    "fully_shard",
    "get_total_norm",
    "install",
    "ledger",
    "materialize",
    "optim",
    "parallelize",
    "plan",
    "record",
    "register_fsdp_forward_method",
    "set_collective_algorithms",
    "set_missing_rank_timeout",
    "set_semantics",
    "share_comm_ctx",
    "state_bytes",
    "summary",
    "trace",
    "uncompile",
    "uninstall",
    "watchdog",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # of what is installed
        return importlib.import_module("importlib.metadata").version("fsdp2")
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f".{_ELSEWHERE[name]}", __name__), name)
    close = ["accumulate"] if name == "no_sync" else importlib.import_module("difflib").get_close_matches(name, __all__, n=1)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + "".join(f"; did you mean {each!r}?" for each in close))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
