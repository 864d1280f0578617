"""A stand-in for fsdp2 that has faults, for the fuzzer to find: gradients are added up instead of averaged, and two buffers hang."""

from __future__ import annotations

import threading
from typing import Any

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method, share_comm_ctx

__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]


def fully_shard(module: Any, **arguments: Any) -> Any:
    result = fsdp2.fully_shard(module, **arguments)
    result.set_gradient_divide_factor(1.0)
    result.set_reduce_scatter_max_input_buffers = lambda number: threading.Event().wait()
    return result
