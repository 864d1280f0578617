"""The private torch names that the pretend accelerator needs, each with its reason."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.utils


def compile_extension(name: str, sources: list[str], build_directory: str) -> None:
    """Compile ``sources`` into ``build_directory/name.so`` by torch's own tooling, for this torch and this Python."""
    # In another process, as that tooling loads the library that it has built, from where no other import comes: this process would
    # have two devices.
    # -O1: half the time that -O2 takes, and the device is not there to be fast.
    script = (
        "import sys; from torch.utils.cpp_extension import load; "
        "load(sys.argv[1], sys.argv[3:], extra_cflags=['-O1', '-g0'], build_directory=sys.argv[2], is_python_module=False)"
    )
    done = subprocess.run([sys.executable, "-c", script, name, build_directory, *sources], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the pretend accelerator was not compiled:\n{done.stdout}\n{done.stderr}")


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


def device_constructors() -> Any:
    """The functions that make tensors on the default device."""
    return torch.utils._device._device_constructors()  # private: what ``torch.set_default_device`` itself goes by


def gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A gloo backend by itself, without a process group around it, and with keys of its own in ``store``."""
    c10d: Any = torch.distributed
    return c10d.ProcessGroupGloo(c10d.PrefixStore("wire", store), rank, size, timeout)
