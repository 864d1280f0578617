"""Functions that run around a module's own forward, inside of all its hooks. No module wraps it, so every name stays.

The module gets an attribute ``forward`` of its own, which hides its class's. Hooks, those of ``fully_shard`` included, run around it,
in either order of the calls. ``inspect.signature`` finds that of the hidden forward.

Note: code of its own. The compiler counts how often it has compiled a function, and gives up at eight times. So each class of
modules gets a copy of ``_traced``, as each class has a forward of its own; ``outer`` runs outside of the graph.

Worked example, ``outer`` offloads what autograd saves, ``inner`` checkpoints

    block(x)    hooks of fully_shard( offload( checkpoint( Block.forward(block, x) ) ) )

Note: bound to no module. The attribute is a method of the ``AroundForward``, not of the module: pickle looks a method up by its name
in the object that it is bound to, and in the module it would find the method of the class.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from ..sharded_class import original_class
from ..torch_names import torch_compiler, torch_modules


class Around(Protocol):
    """A function that runs around a forward."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``forward(*args, **kwargs)`` returns. ``forward`` is the module's, or the next function around that."""


@dataclass(frozen=True, eq=False)
class AroundForward:
    """The functions that run around one module's forward, from the outermost to the innermost.

    cls:    the module's class, before ``fully_shard`` changes it
    own:    a forward that the module, not its class, had before
    outer:  outside of the graph, if the module is compiled
    middle: as ``outer``, inside of it
    inner:  what the compiler can trace
    traced: runs ``inner`` and the forward
    """

    module: nn.Module
    cls: Any
    own: Callable[..., Any] | None
    outer: Around | None = None
    middle: Around | None = None
    inner: Around | None = None
    traced: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        vars(self)["traced"] = _traced_for(self.cls)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "traced"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, traced=_traced_for(state["cls"]))

    @property
    def forward(self) -> Callable[..., Any]:
        """The method that hides the module's forward. Pickle asks for it by this name, before the module has its attributes."""
        shared = self.traced if self.outer is None and self.middle is None else _outside
        made = types.FunctionType(shared.__code__, globals(), "forward")
        vars(made).update(vars(shared))
        hidden = self.cls.forward if self.own is None else self.own
        signature = inspect.signature(hidden)
        if self.own is not None:
            first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            signature = signature.replace(parameters=[first, *signature.parameters.values()])
        made.__signature__ = signature  # type: ignore[attr-defined]
        made.__doc__ = hidden.__doc__
        return types.MethodType(made, self)


_ATTRIBUTE = "_fsdp2_around_forward"


def around_forward(module: nn.Module) -> AroundForward:
    """The functions that run around the forward of ``module`` now."""
    found = vars(module).get(_ATTRIBUTE)
    if isinstance(found, AroundForward):
        return found
    cls = original_class(type(module)) if torch_modules.module_state(module) is not None else type(module)
    return AroundForward(module, cls, own=vars(module).get("forward"))


def put_around_forward(module: nn.Module, **places: Around) -> None:
    """Let the values of ``places`` run around forward from now on; the keys are names of ``AroundForward``."""
    changed = replace(around_forward(module), **places)  # type: ignore[arg-type]
    # Not through the module's own ``__setattr__``.
    vars(module)[_ATTRIBUTE] = changed
    vars(module)["forward"] = changed.forward


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that all functions run around."""
    around: Any = module._fsdp2_around_forward
    own: Callable[..., Any] | None = around.own
    return functools.partial(type(module).forward, module) if own is None else own


def _traced(around: AroundForward, /, *args: Any, **kwargs: Any) -> Any:
    inner = around.inner
    forward = own_forward(around.module)
    return forward(*args, **kwargs) if inner is None else inner.run(around.module, forward, args, kwargs)


@functools.cache
def _traced_for(cls: type) -> Callable[..., Any]:
    name = f"forward of {cls.__qualname__}"
    code = _traced.__code__.replace(co_name=name)
    return types.FunctionType(code, globals(), name)


@torch_compiler.dynamo_skips
def _outside(around: AroundForward, /, *args: Any, **kwargs: Any) -> Any:
    module = around.module
    run: Callable[..., Any] = functools.partial(around.traced, around)
    if around.middle is not None:
        run = functools.partial(_run, around.middle, module, run)
    return run(*args, **kwargs) if around.outer is None else around.outer.run(module, run, args, kwargs)


@torch_compiler.dynamo_skips
def _run(around: Around, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return around.run(module, forward, args, kwargs)
