"""Let accelerate and torchtitan shard over processes without GPUs, so that these examples run on any computer.

Both refuse that: accelerate applies its FSDP plugin to accelerators alone, torchtitan takes the device type to be cuda. A program for
GPUs needs nothing of this file, and where there are GPUs it does nothing.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def for_accelerate() -> None:
    """Call it before ``Accelerator()`` or ``TrainingArguments()``. CPU ranks then go by the name of another device."""
    from accelerate.state import DistributedType, PartialState

    if torch.cuda.is_available():
        return

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        self.device = torch.device("cpu")
        return "gloo", DistributedType.MULTI_XPU

    PartialState._prepare_backend = prepare_backend


def for_torchtitan() -> None:
    """Call it before torchtitan's other modules are imported: they copy the name."""
    import torchtitan.tools.utils

    if not torch.cuda.is_available():
        torchtitan.tools.utils.device_type = "cpu"


def leave() -> None:
    """End the process. A thread of gloo (torch <= 2.13) may still be dropping its last tensor, and would abort a process whose
    interpreter is half gone."""
    dist.destroy_process_group()
    if not torch.cuda.is_available():
        sys.stdout.flush()
        os._exit(0)
