"""The compiler, seen from code that it runs; ``compiled/torch_names.py`` has what captures graphs."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from . import torch_name

# Without these, the public ``torch.compiler.disable`` does their work: it imports the compiler, and hooks are slower.
_eval_frame = "torch._C._dynamo.eval_frame."
_get_eval_frame_callback = torch_name(f"{_eval_frame}get_eval_frame_callback", False)
_set_code_exec_strategy = torch_name(f"{_eval_frame}set_code_exec_strategy", False)
_FrameAction = torch_name(f"{_eval_frame}_FrameAction", False)
_FrameExecStrategy = torch_name(f"{_eval_frame}_FrameExecStrategy", False)
_CAN_SKIP_FRAMES = all((_get_eval_frame_callback, _set_code_exec_strategy, _FrameAction, _FrameExecStrategy))

_F = TypeVar("_F", bound=Callable[..., Any])

_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT) if _CAN_SKIP_FRAMES else None


def dynamo_disabled(hook: _F, reason: str = "fsdp2 hooks run outside of the graph") -> _F:
    """``hook``, which the compiler neither traces nor compiles; with ``fullgraph`` its error says ``reason``.

    Costs one comparison while no compiled code is around. The compiler's own wrapper is made, and the compiler
    imported, at the first call under it: making it at each call costs a tenth of upstream's host time.
    """
    if not _CAN_SKIP_FRAMES:
        disabled: Any = torch.compiler.disable
        return disabled(hook, recursive=True, reason=reason)  # type: ignore[no-any-return]
    guarded: list[Callable[..., Any]] = []

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _get_eval_frame_callback() is None:
            return hook(*args, **kwargs)
        if not guarded:
            disable: Any = torch._dynamo.disable
            guarded.append(disable(hook, recursive=True, reason=reason))
        return guarded[0](*args, **kwargs)

    # As a frame, too: not compiled when code that the compiler runs calls it.
    _set_code_exec_strategy(run.__code__, _SKIP)  # type: ignore[attr-defined]
    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # read by the tracer
    run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    run._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    run._torchdynamo_orig_callable = hook  # type: ignore[attr-defined]
    run._guarded = guarded  # type: ignore[attr-defined]  # read by ``has_met_compiler``
    return run  # type: ignore[return-value]


def dynamo_skips(function: _F) -> _F:
    """Let the compiler leave the frames of ``function`` alone, and compile what it calls."""
    if _CAN_SKIP_FRAMES:
        _set_code_exec_strategy(function.__code__, _SKIP)
    return function


def keep_hooks_outside(module: nn.Module) -> None:
    """Let ``module``, if it is compiled in place, run its hooks outside of the graph.

    torch 2.14 puts a function around the call of a module of its own, so that the compiler traces the hooks, too, and
    breaks the graph at each: the compiler skips that function, and compiles the forward that it leads to.
    """
    around = getattr(module._compiled_call_impl, "_torchdynamo_orig_callable", None)
    if isinstance(around, types.FunctionType):
        around.__code__ = around.__code__.replace()  # not that of all functions of this kind
        dynamo_skips(around)


def has_met_compiler(hook: Callable[..., Any]) -> bool:
    """Whether code that the compiler runs has called ``hook``, a ``dynamo_disabled`` function."""
    return bool(getattr(hook, "_guarded", ()))


def compiled_modules(root: nn.Module) -> list[nn.Module]:
    """The modules below ``root`` that ``module.compile()`` or ``torch.compile`` was called on, parents first."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return []
    found = [each for each in root.modules() if isinstance(each, compiler.OptimizedModule) or each._compiled_call_impl is not None]
    return [each._orig_mod if isinstance(each, compiler.OptimizedModule) else each for each in found]
