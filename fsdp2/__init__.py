"""fsdp2: an independent, DTensor-based ``fully_shard``.

``import fsdp2`` imports what sharding needs, and the rest when a program first asks for it. Error classes are in ``fsdp2.errors``.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import errors
from .api import adopt, fully_shard, register_fsdp_forward_method, share_comm_ctx
from .clients import pretrained as _pretrained
from .clip import clip_grad_norm_, get_total_norm
from .core.iteration.finalization import GradientReductionHandle
from .errors import FSDPError
from .fsdp_module import FSDPModule, UnshardHandle
from .materialize import materialize
from .policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    set_collective_algorithms,
)
from .semantics import set_semantics
from .strategy import accumulate, parallelize

if TYPE_CHECKING:
    from . import activations, checkpoint, compat, doctor, optim, publishing, state_bytes, wrap
    from .activations import ActivationCheckpointPolicy as ActivationCheckpointPolicy
    from .activations import apply_activation_checkpointing, apply_activation_offload
    from .agreed.guarded import guarded, guarded_step
    from .agreed.rounds import uneven
    from .captured import capture
    from .compiled import compile, uncompile  # noqa: A004 (named after torch.compile)
    from .errors import *  # noqa: F403
    from .hangs.lookout import set_missing_rank_timeout
    from .hangs.watcher import watchdog
    from .inspector.ledger_file import ledger
    from .inspector.record_file import record
    from .inspector.trace_file import trace
    from .installation import install, uninstall
    from .model_summary import summary
    from .parking import park, unpark
    from .planner.api import plan
    from .policy import AllGather as AllGather
    from .policy import ReduceScatter as ReduceScatter
    from .publishing import publish
    from .snapshots import snapshot

__all__ = [  # noqa: RUF022 (by task)
    # shard a model
    "fully_shard",
    "adopt",
    "parallelize",
    "materialize",
    "compile",
    "uncompile",
    "wrap",
    # how it is sharded
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "DiskOffloadPolicy",
    "DataParallelMeshDims",
    "ShardPlacementResult",
    # a sharded module
    "FSDPModule",
    "UnshardHandle",
    "GradientReductionHandle",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    # train it
    "accumulate",
    "capture",
    "clip_grad_norm_",
    "get_total_norm",
    "guarded",
    "guarded_step",
    "uneven",
    "apply_activation_checkpointing",
    "apply_activation_offload",
    "activations",
    "optim",
    "checkpoint",
    "park",
    "unpark",
    "snapshot",
    "publish",
    "publishing",
    # plan, watch and check a run
    "plan",
    "state_bytes",
    "summary",
    "ledger",
    "record",
    "trace",
    "watchdog",
    "doctor",
    # settings of the process
    "set_collective_algorithms",
    "set_missing_rank_timeout",
    "set_semantics",
    # programs written for torch's FSDP
    "install",
    "uninstall",
    "compat",
    # errors
    "FSDPError",
    "errors",
]

_MODULES = ("activations", "checkpoint", "compat", "doctor", "inspect", "optim", "publishing", "reference", "state_bytes", "wrap")
_ELSEWHERE = {
    "ActivationCheckpointPolicy": "activations",
    "AllGather": "policy",
    "ReduceScatter": "policy",
    "apply_activation_checkpointing": "activations",
    "apply_activation_offload": "activations",
    "capture": "captured",
    "compile": "compiled",
    "install": "installation",
    "ledger": "inspector.ledger_file",
    "guarded": "agreed.guarded",
    "guarded_step": "agreed.guarded",
    "park": "parking",
    "plan": "planner.api",
    "publish": "publishing",
    "set_missing_rank_timeout": "hangs.lookout",
    "snapshot": "snapshots",
    "summary": "model_summary",
    "record": "inspector.record_file",
    "trace": "inspector.trace_file",
    "uncompile": "compiled",
    "uneven": "agreed.rounds",
    "uninstall": "installation",
    "unpark": "parking",
    "watchdog": "hangs.watcher",
}


def _writers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from .checkpoint.full_state import entries_on_rank_0
    from .checkpoint.transformers_save import plain_call

    return plain_call, entries_on_rank_0


_pretrained.writers = _writers


def __getattr__(name: str) -> Any:
    if name == "__version__":  # of the installed package
        return importlib.import_module("importlib.metadata").version("fsdp2")
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f".{_ELSEWHERE[name]}", __name__), name)
    error = vars(errors).get(name)
    if isinstance(error, type) and issubclass(error, Exception):  # older programs know them by fsdp2.<name>
        return error
    close = ["accumulate"] if name == "no_sync" else importlib.import_module("difflib").get_close_matches(name, __all__, n=1)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + "".join(f"; did you mean {each!r}?" for each in close))


def __dir__() -> list[str]:
    return sorted(__all__)
