"""One module's checkpoint: autograd saves its inputs alone, and its forward runs again when backward asks for the rest.

It is what the compiler can trace, and takes into the graph of backward.

Source: Chen et al. 2016; torch's non-reentrant checkpoint, whose selective form saves the results of some operators all the same.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .torch_names import selective_checkpoint


class Checkpoint:
    """Runs around the forward of one module.

    save_ops:  operators whose results are saved
    saves_all: it does nothing for now
    """

    def __init__(self, save_ops: tuple[Any, ...]) -> None:
        self.save_ops = save_ops
        self.saves_all = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Operators by name; and nothing is chosen yet in a copy, whose budget has measured nothing."""
        return _with_operators, ([str(each) for each in self.save_ops],)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``forward(*args, **kwargs)``."""
        if self.saves_all or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if kwargs:  # a name among them may be one that ``checkpoint`` takes for its own
            forward = functools.partial(forward, **kwargs)
        if not self.save_ops:
            return checkpoint(forward, *args, use_reentrant=False)
        contexts = functools.partial(create_selective_checkpoint_contexts, list(self.save_ops))
        return selective_checkpoint(forward, args, contexts)


def _with_operators(names: list[str]) -> Checkpoint:
    return Checkpoint(tuple(operator.attrgetter(name)(torch.ops) for name in names))
