"""The private torch names that the pretend accelerator stands on, in one place, each with its reason. It refuses to know fsdp2."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.utils
from torch.utils import cpp_extension


def compile_extension(name: str, sources: list[str], build_directory: str) -> None:
    """Compile ``sources`` into ``build_directory/name.so`` by torch's own tooling, for this torch and this Python."""
    # -O1: half the time that -O2 takes, and the device is not there to be fast.
    cpp_extension.load(name, sources, extra_cflags=["-O1", "-g0"], build_directory=build_directory, is_python_module=False)


def name_backend(name: str, make_module: Callable[[], ModuleType]) -> None:
    """Let torch's spare device type be called ``name``; ``torch.name`` becomes the module that is made then. Once a process."""
    utils: Any = torch.utils
    register: Any = torch._register_device_module  # private: torch has no public way to register a device's module
    utils.rename_privateuse1_backend(name)
    register(name, make_module())
    utils.generate_methods_for_privateuse1_backend()


def activate_meta_kernels() -> None:
    """Load the meta kernels that torch writes in Python, by which operators are asked for sizes."""
    importlib.import_module("torch._meta_registrations")  # private: there is no public import that only registers them


def gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A gloo backend by itself, without a process group around it, and with keys of its own in ``store``."""
    c10d: Any = torch.distributed
    return c10d.ProcessGroupGloo(c10d.PrefixStore("wire", store), rank, size, timeout)
