"""Hears calls of ``torch.nn.utils.clip_grad_norm_`` and ``fsdp2.clip_grad_norm_``, also from modules that have imported them already.

This file refuses to know what a clip should do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .. import clip
from ..core import torch_compat as compat

Listener = Callable[[Sequence[Tensor]], None]
"""Called with the parameters whose gradients are about to be clipped."""

_listeners: list[Listener] = []
_usual: list[tuple[Any, str, Any]] = []


def listen(listener: Listener) -> None:
    """Call ``listener`` at each clip of this process, until ``ignore``."""
    _listeners.append(listener)
    if _usual:
        return
    for module, name, place in ((*compat.clipping_step(), 0), (clip, "total_norm", 1)):
        usual = getattr(module, name)
        _usual.append((module, name, usual))
        setattr(module, name, _heard(usual, place))


def ignore(listener: Listener) -> None:
    """Do not call ``listener`` any more. With the last one both functions are as they were."""
    _listeners.remove(listener)
    while _usual and not _listeners:
        setattr(*_usual.pop())


def _heard(usual: Callable[..., Any], place: int) -> Callable[..., Any]:
    """place: of the parameters among the arguments; equal to all other tensors there, they are no parameters"""

    def hear(*args: Any, **kwargs: Any) -> Any:
        if place == 0 or args[0] is not args[place]:
            for listener in _listeners:
                listener(args[place])
        return usual(*args, **kwargs)

    return hear
