"""The device in place of the CPU, for a script that finds no GPU, and was not written for the device.

    with in_place_of_the_cpu():
        dist.init_process_group("gloo")            # a backend of the device as well
        model = nn.Linear(4, 4)                    # on the device
        mesh = init_device_mesh("cpu", (2,))       # of the device
        x = torch.randn(2, 4).to("cpu")            # on the device
        model(x).sum().cpu()                       # on the host: a wait for the device

Modules of torch (but ``torch.nn``) and of this package know what they keep on the host: their tensors stay there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

from .process_group import BACKEND
from .torch_names import device_constructors

_DEVICE = "pretend"


@contextlib.contextmanager
def in_place_of_the_cpu() -> Iterator[None]:
    """Inside, what a script asks of the CPU is the device's, once ``activate`` has been called."""
    usual, make = dist.init_process_group, device_mesh.DeviceMesh.__init__

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        usual(f"cpu:gloo,{_DEVICE}:{BACKEND}", *args, **kwargs)

    def make_mesh(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(mesh, _DEVICE if device_type == "cpu" else device_type, *args, **kwargs)

    with contextlib.ExitStack() as inside:
        for home in (dist, dist.distributed_c10d, device_mesh):
            inside.enter_context(mock.patch.object(home, "init_process_group", init_process_group))
        inside.enter_context(mock.patch.object(device_mesh.DeviceMesh, "__init__", make_mesh))
        inside.enter_context(_InPlaceOfTheCPU())
        yield


class _InPlaceOfTheCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func is Tensor.to or func in device_constructors()) and _is_for_the_script(sys._getframe(1).f_globals.get("__name__", "")):
            if func is Tensor.to:
                args = tuple(_DEVICE if _is_cpu(each) else each for each in args)
                kwargs = kwargs | ({"device": _DEVICE} if _is_cpu(kwargs.get("device")) else {})
            elif kwargs.get("device") is None or _is_cpu(kwargs["device"]):
                if kwargs.get("generator") is not None:
                    return func(*args, **kwargs).to(_DEVICE)
                kwargs = kwargs | {"device": _DEVICE}
        return func(*args, **kwargs)


def _is_cpu(given: Any) -> bool:
    return (isinstance(given, (str, torch.device)) and torch.device(given).type == "cpu") if given is not None else False


def _is_for_the_script(name: str) -> bool:
    return name.startswith("torch.nn.") or name.split(".")[0] not in ("torch", "fsdp2")


__all__ = ["in_place_of_the_cpu"]
