"""Hears calls of other libraries' functions, also from modules that have imported them already where torch lets us.

clips        ``torch.nn.utils.clip_grad_norm_`` and ``fsdp2.clip_grad_norm_``: the parameters
backwards    ``torch.autograd.backward``, which ``loss.backward()`` calls: the loss, or several
all_reduces  ``torch.distributed.all_reduce``: the tensor, and the process group
metrics      ``ReduceLROnPlateau.step``: the scheduler, and the metric
losses       loss functions of ``torch.nn.functional``: the name, the arguments, and what it has returned
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import clip

Place = tuple[Any, str, Callable[..., "tuple[Any, ...] | None"]]
"""A function, by its owner and name; and from the function's arguments what listeners are told, None: nothing."""


class Calls:
    """Calls of the functions at ``places``. has_results: listeners are told afterwards, and get the result last"""

    def __init__(self, places: Callable[[], Iterable[Place]], has_results: bool = False) -> None:
        self._places = places
        self._has_results = has_results
        self._listeners: list[Callable[..., None]] = []
        self._usual: list[tuple[Any, str, Any]] = []

    def listen(self, listener: Callable[..., None]) -> Callable[[], None]:
        """Call ``listener`` at each call in this process. Returns a function that ends it."""
        self._listeners.append(listener)
        if not self._usual:
            for owner, name, told in self._places():
                usual = getattr(owner, name)
                self._usual.append((owner, name, usual))
                setattr(owner, name, self._heard(usual, told))
        return functools.partial(self._ignore, listener)

    def _ignore(self, listener: Callable[..., None]) -> None:
        """With the last listener all functions are as they were."""
        self._listeners.remove(listener)
        while self._usual and not self._listeners:
            setattr(*self._usual.pop())

    def _heard(self, usual: Callable[..., Any], told: Callable[..., tuple[Any, ...] | None]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def hear(*args: Any, **kwargs: Any) -> Any:
            said = told(*args, **kwargs)
            if self._has_results and not torch.compiler.is_compiling():
                result = usual(*args, **kwargs)
                self._tell(*(said or ()), result)
                return result
            if said is not None and not self._has_results:
                self._tell(*said)
            return usual(*args, **kwargs)

        return hear

    def _tell(self, *said: Any) -> None:
        for listener in self._listeners:
            listener(*said)


clips = Calls(
    lambda: (
        (torch.nn.utils.clip_grad, "_clip_grads_with_norm_", lambda params, *_, **__: (params,)),
        # Gradients where parameters belong: a norm without a clip.
        (clip, "total_norm", lambda first, params, *_, **__: None if first is params else (params,)),
    )
)
all_reduces = Calls(
    lambda: [
        (owner, "all_reduce", lambda tensor, op=None, group=None, *_, **__: (tensor, group)) for owner in (dist, dist.distributed_c10d)
    ]
)
backwards = Calls(lambda: [(torch.autograd, "backward", lambda tensors, *_, **__: (tensors,))])
metrics = Calls(lambda: [(ReduceLROnPlateau, "step", lambda scheduler, metrics, *_, **__: (scheduler, metrics))])


LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits")
losses = Calls(lambda: [(F, name, lambda *args, name=name, **kwargs: (name, args, kwargs)) for name in LOSSES], has_results=True)
