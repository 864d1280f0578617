"""A script that asks for GPUs and NCCL runs on CPU processes: its devices are the CPU, its backend is gloo.

    torch.cuda.set_device(rank); net.cuda(); dist.init_process_group("nccl"); DDP(net, device_ids=[rank])

run as if each had said CPU and gloo. Both sides of ``--parity`` run so, and differ in nothing but what was rewritten. A script that
asks ``torch.cuda.is_available()`` is told the truth. Streams, events and
extensions of CUDA stay errors.

Worked example, ``torch.ones(2, device="cuda:1").to(0)``: a mode sees both functions of torch, and puts ``cpu`` for ``"cuda:1"`` and 0.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
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
    torch_dist: Any = dist
    for name in ("init_process_group", "new_group"):
        setattr(torch_dist, name, _with_gloo(getattr(dist, name)))
    mesh: Any = torch_dist.device_mesh
    mesh.init_device_mesh = torch_dist.init_device_mesh = _of_cpus(mesh.init_device_mesh)
    mesh.DeviceMesh.__init__ = _of_cpus(mesh.DeviceMesh.__init__)
    torch.autocast.__init__ = _of_cpus(torch.autocast.__init__)  # type: ignore[method-assign]
    nn.Module.to = _of_modules(nn.Module.to)  # type: ignore[method-assign]  # it reads its arguments itself
    _with_arguments(nn.parallel.DistributedDataParallel, device_ids=None, output_device=None)
    mode: Any = _OnCPU()
    mode.__enter__()


def let_fsdp1_run() -> None:
    """Without an accelerator, FSDP1 runs if it is told that its device is the CPU; otherwise it looks for one, and raises."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    _with_arguments(FullyShardedDataParallel, device_id=_CPU)


class _OnCPU(TorchFunctionMode):
    """Puts the CPU for GPUs among the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is torch.device:
            named = args[0] if args else kwargs.get("type")
            return _CPU if type(named) is int or type(_cpu_for(named)) is torch.device else func(*args, **kwargs)
        args = [_cpu_for(each) for each in args]
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args[1] = _CPU
        for name, value in kwargs.items():
            kwargs[name] = _CPU if name == "device" and type(value) is int else _cpu_for(value)
        return func(*args, **kwargs)


def _cpu_for(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return _CPU if type(value) is str and _NAMES_A_GPU.fullmatch(value) else value


def _of_cpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose arguments may name the device type "cuda"."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if _is_cuda(each) else each for each in args)
        return function(*args, **{name: "cpu" if _is_cuda(value) else value for name, value in kwargs.items()})

    return called


def _of_modules(to: Callable[..., Any]) -> Callable[..., Any]:
    """``nn.Module.to``, which also takes a GPU's number."""

    @functools.wraps(to)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_CPU if type(each) is int else each for each in args)
        return to(self, *args, **{name: _CPU if name == "device" and type(value) is int else value for name, value in kwargs.items()})

    return called


def _is_cuda(value: Any) -> bool:
    return type(value) is str and value == "cuda"


def _with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which makes a process group, of gloo where it names NCCL, and bound to no device."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        args = tuple("gloo" if _is_nccl(each) else each for each in args)
        return function(*args, **{name: "gloo" if _is_nccl(value) else value for name, value in kwargs.items()})

    return called


def _is_nccl(value: Any) -> bool:
    return type(value) is str and "nccl" in value


def _with_arguments(cls: Any, **given: Any) -> None:
    """Let ``cls`` get ``given`` instead of what the script passes for them."""
    before = cls.__init__

    @functools.wraps(before)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs | given)

    cls.__init__ = initialize
