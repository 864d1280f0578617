"""A stand-in for fsdp2 that has faults, for the fuzzer to find.

Gradients are added up instead of averaged, two buffers hang, and offloaded optimizers load nothing.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "fully_shard",
    "optim",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def fully_shard(module: Any, **arguments: Any) -> Any:
    result = fsdp2.fully_shard(module, **arguments)
    result.set_gradient_divide_factor(1.0)
    result.set_reduce_scatter_max_input_buffers = lambda number: threading.Event().wait()
    return result


def _offloaded(*args: Any, **options: Any) -> Any:
    optimizer = fsdp2.optim.offloaded(*args, **options)
    optimizer.load_state_dict = lambda state: None
    return optimizer


optim = SimpleNamespace(offloaded=_offloaded)
