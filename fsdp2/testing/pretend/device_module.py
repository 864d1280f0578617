"""``torch.pretend``: the module that code written for accelerators finds at ``torch.<device type>``.

Streams and events are torch's own generic ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .build import extension


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    """Work started inside goes to ``stream``; None changes nothing."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    """There is one device, which is the current one."""
    yield


class Graph:
    """``torch.cuda.CUDAGraph``'s calls: the work of a capture runs in each replay, and only then."""

    def __init__(self) -> None:
        self._number = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        extension().begin_capture(True)

    def capture_end(self) -> None:
        self._number = extension().end_capture(True)

    def replay(self) -> None:
        extension().replay(self._number)


def make_device_module(name: str, ext: Any = None) -> ModuleType:
    """The module, for a device type that is called ``name``. ext: the compiled device, by default the pretend accelerator"""
    device = torch.device(name, 0)
    ext = ext or extension()
    generator = ext.default_generator()
    module = ModuleType(f"torch.{name}", __doc__)

    def get_rng_state(device: Any = None) -> Tensor:
        state: Tensor = generator.get_state()
        return state

    def default_stream(device: Any = None) -> torch.Stream:
        current = torch.accelerator.current_stream()
        return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)

    def memory(key: str) -> Any:
        return lambda device=None: ext.memory_stats()[key]

    def refuse_nothing(*args: object) -> None:
        pass

    contents: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": refuse_nothing,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": refuse_nothing,
        "device": _device,
        "Stream": partial(torch.Stream, device=device),
        "Event": partial(torch.Event, device=device),
        "stream": _stream,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_stream": default_stream,
        "synchronize": lambda device=None: ext.synchronize(),
        "is_current_stream_capturing": ext.is_capturing,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 0),  # graphs share one pool
        "default_generators": (generator,),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "seed": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "memory_allocated": memory("allocated"),
        "max_memory_allocated": memory("peak"),
        "memory_reserved": memory("reserved"),
        "reset_peak_memory_stats": lambda device=None: ext.reset_peak_memory(),
        "memory_stats": lambda device=None: ext.memory_stats(),
        "empty_cache": refuse_nothing,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
    }
    vars(module).update(contents)
    return module


__all__ = ["make_device_module"]
