"""Private torch names of checkpointing and of hooks for saved tensors, and what differs between versions of torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


def selective_checkpoint(function: Callable[..., Any], args: tuple[Any, ...], contexts: Callable[[], tuple[Any, Any]]) -> Any:
    """``function(*args)`` in a checkpoint that saves what ``contexts`` say, past the hooks for saved tensors around it.

    torch 2.14 asks which of both one wants, by a warning that names a later change; all others know this way alone.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **_PAST_HOOKS)


_PAST_HOOKS: dict[str, Any] = {
    name: False for name in inspect.signature(torch.utils.checkpoint.checkpoint).parameters if name == "respect_saved_tensors_hooks"
}


def hooks_for_saved_tensors() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The hooks that pack and unpack the tensors that autograd saves now; None if there are none."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if found is None else (found[0], found[1])


def is_compiled_whole(module: nn.Module) -> bool:
    """Whether ``module.compile(fullgraph=True)`` was called; where torch does not show it, False."""
    compiled: Any = module._compiled_call_impl
    code = getattr(compiled, "__code__", None)
    if code is None or "self" not in code.co_freevars:
        return False
    return getattr(compiled.__closure__[code.co_freevars.index("self")].cell_contents, "fullgraph", False) is True
