"""A script that asks for GPUs and NCCL runs on CPU processes: its devices are the CPU, its backend is gloo.

    torch.cuda.set_device(rank); net.cuda(); dist.init_process_group("nccl"); DDP(net, device_ids=[rank])

run as if each had said CPU and gloo. Both sides of ``--parity`` run so, and differ only in what was rewritten. A script that asks
``torch.cuda.is_available()`` is told the truth. Streams, events and extensions of CUDA stay errors.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_NAMES_A_GPU = re.compile(r"cuda(:\d+)?")
_DOES_NOTHING = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats")
_IS_ZERO = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def asks_for_gpus(text: str) -> bool:
    return re.search(r"\b(cuda|nccl)\b", text) is not None


def stand_in() -> None:
    """Run on the CPU from now on, in this process, until it ends."""
    cuda: Any = torch.cuda
    for name in _DOES_NOTHING:
        setattr(cuda, name, lambda *_, **__: None)
    for name in _IS_ZERO:
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # so that `rank % device_count()` is the rank
    _change(dist, "init_process_group", device_id=None)
    _change(dist, "new_group", device_id=None)
    _change(dist, "init_device_mesh")
    _change(dist.device_mesh, "init_device_mesh")
    _change(dist.device_mesh.DeviceMesh, "__init__")
    _change(torch.autocast, "__init__")
    _change(nn.Module, "to", numbers_are_gpus=True)  # it reads its arguments itself
    _change(nn.parallel.DistributedDataParallel, "__init__", device_ids=None, output_device=None)
    mode: Any = _OnCPU()
    mode.__enter__()


def let_fsdp1_run() -> None:
    """Without an accelerator, FSDP1 runs if it is told that its device is the CPU; otherwise it looks for one, and raises."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    _change(FullyShardedDataParallel, "__init__", device_id=_CPU)


class _OnCPU(TorchFunctionMode):
    """Puts the CPU for GPUs among the arguments of torch's functions: of ``torch.ones(2, device="cuda:1").to(0)``, in both."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is torch.device:
            named = args[0] if args else kwargs.get("type")
            return _CPU if type(named) is int or isinstance(_on_cpu(named), torch.device) else func(*args, **kwargs)
        args = [_on_cpu(each) for each in args]
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args[1] = _CPU
        return func(*args, **{name: _on_cpu(value, name == "device") for name, value in kwargs.items()})


def _on_cpu(value: Any, numbers_are_gpus: bool = False) -> Any:
    if isinstance(value, torch.device):
        is_gpu = value.type == "cuda"
    else:
        is_gpu = (type(value) is int and numbers_are_gpus) or (type(value) is str and _NAMES_A_GPU.fullmatch(value) is not None)
    return _CPU if is_gpu else value


def _change(owner: Any, name: str, numbers_are_gpus: bool = False, **given: Any) -> None:
    """Let a function take the CPU and gloo where the script passes GPUs and NCCL, and ``given`` in place of the script's arguments."""
    before = getattr(owner, name)

    def changed(value: Any) -> Any:
        if type(value) is str and ("nccl" in value or value == "cuda"):
            return "gloo" if "nccl" in value else "cpu"
        return _on_cpu(value, numbers_are_gpus)

    @functools.wraps(before)
    def called(*args: Any, **kwargs: Any) -> Any:
        return before(*map(changed, args), **{each: changed(value) for each, value in kwargs.items()} | given)

    setattr(owner, name, called)
