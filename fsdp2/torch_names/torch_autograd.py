"""Autograd: the backward that is running, nodes, saved tensors, transforms, and whether a forward has failed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad

from . import torch_name

__all__ = ["forward_ad"]  # in addition to the names that are defined here


current_graph_task: Callable[[], int] = torch_name("torch._C._current_graph_task_id")  # -1 outside of backward

# Call it only inside backward.
will_run_in_this_backward: Callable[[Any], bool] = torch_name("torch._C._will_engine_execute_node")


def checkpoint_around() -> object | None:
    """An object, for weak references, that stands for the outermost running checkpoint that is not re-entrant.

    One in another is recomputed with the other.
    """
    autograd: Any = torch._C._autograd
    found = None
    taken = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        if hooks[0].__module__ == "torch.utils.checkpoint":
            found = hooks[0]
        if not autograd._saved_tensors_hooks_is_enabled():  # then none can be put back
            break
        autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    for pack, unpack in reversed(taken):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found


def in_reentrant_checkpoint() -> bool:
    """Whether a re-entrant checkpoint is on the stack: it runs its function without a graph, which backward makes."""
    code = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def leaf_gets_gradient_in_this_backward(leaf: Tensor) -> bool:
    """Whether the backward that is running puts a gradient into ``leaf``; only inside backward."""
    try:
        return will_run_in_this_backward(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # of a leaf that ``torch.autograd.grad`` was asked for
        return True


# If gone, profiles lack our labels.
profiler_is_on: Callable[[], bool] = torch_name("torch._C._autograd._profiler_enabled", lambda: False)


functorch_is_active: Callable[[], bool] = torch_name("torch._C._are_functorch_transforms_active")


def preserved_versions(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """Inside, autograd does not notice writes to ``tensors``."""
    context: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
    return context(tensors)  # type: ignore[no-any-return]


def queue_end_of_backward(callback: Callable[[], None]) -> bool:
    """Run ``callback``, outside of transforms, when the current graph task (the innermost backward) has finished.

    Returns: False, and queues nothing, if a compiler replaces what the autograd engine does, hooks included
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
        return False
    run = callback
    if functorch_is_active():

        def run() -> None:
            with functorch_disabled():
                callback()

    torch.autograd.Variable._execution_engine.queue_callback(run)
    return True


def caller_of_hooks() -> types.FrameType | None:
    """The innermost frame outside of our hooks and the compiler's wrappers: usually that of ``nn.Module.__call__``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
        frame = frame.f_back
    return frame


# Not by paths: anybody may have such a one.
_HOOKS = (
    "fsdp2.core.",
    "fsdp2.agreed.guarded_pass",
    "fsdp2.torch_names.",
    "fsdp2.clients.memory_tracker",
    "torch._dynamo.",
    "torch.distributed._tools.",
)


def a_module_has_failed() -> bool:
    """In a forward hook with ``always_call``: whether forward, or another hook, has raised."""
    error = sys.exc_info()[1]
    # Somebody may also run a whole forward while handling an exception: that was not caught where modules are called.
    return error is not None and error.__traceback__ is not None and error.__traceback__.tb_frame is caller_of_hooks()


def functorch_disabled() -> AbstractContextManager[Any]:
    return torch._C._DisableFuncTorch()


def levels_of(tensor: Tensor) -> list[Tensor]:
    """``tensor``, the tensors that transforms of ``torch.func`` wrapped in it, and tangents: each has its own graph.

    Only tangents of the innermost transform.
    """
    functorch: Any = torch._C._functorch
    stack = functorch.peek_interpreter_stack() if functorch_is_active() else None
    has_tangents = forward_ad._current_level >= 0 and (stack is None or stack.key() == functorch.TransformType.Jvp)
    found = [tensor]
    for each in found:  # grows
        if functorch.is_functorch_wrapped_tensor(each):
            found.append(functorch.get_unwrapped(each))
        if has_tangents:
            tangent = forward_ad.unpack_dual(each).tangent  # type: ignore[no-untyped-call]
            if tangent is not None:
                found.append(tangent)
    return found
