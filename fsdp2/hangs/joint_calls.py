"""The call that several ranks must make and that the main thread is in: ``full_state_dict``, ``save``, ``clip_grad_norm_``, ...

    @joint
    def full_state_dict(model): ...

    current is JointCall("full_state_dict", number=3, ...)      inside its third call; None outside

A call within another one counts as the outer call. Each call costs two writes to this module, and sends nothing. The watchdog
and the thread of ``lookout.py`` read them.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class JointCall:
    """number: how often this rank has called the function, from 1; arguments: those of the call, by place and by name"""

    name: str
    number: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


current: JointCall | None = None
"""The call that the main thread is in. Read it as an attribute of this module, each time."""

counts: Counter[str] = Counter()
"""How often this rank has called each function."""


def joint(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which all ranks must call, such that a lookout sees it while it runs."""
    name = function.__name__

    @functools.wraps(function)
    def seen(*args: P.args, **kwargs: P.kwargs) -> R:
        global current
        if current is not None or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        counts[name] += 1
        current = JointCall(name, counts[name], (args, kwargs))
        try:
            return function(*args, **kwargs)
        finally:
            current = None

    return seen


def expected(call: JointCall) -> set[int]:
    """The ranks that must make the call: those of its process group, or of its parameters' meshes; none stands for all ranks."""
    args, kwargs = call.arguments
    group = kwargs.get("process_group") or getattr(args[0] if args else None, "process_group", None)
    if group is not None:
        return set(dist.get_process_group_ranks(group))
    found: set[int] = set()
    for param in _parameters(args[:2] or tuple(kwargs.values())):
        if isinstance(param, DTensor):
            found.update(param.device_mesh.mesh.flatten().tolist())
    return found


def _parameters(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for each in arguments:
        if isinstance(each, nn.Module):
            for module in each.modules():  # not each.parameters(), which may reshard, and this is another thread
                yield from (param for param in module._parameters.values() if param is not None)
        elif isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from (tensor for tensor in each if isinstance(tensor, Tensor))
