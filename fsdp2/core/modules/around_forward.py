"""What runs around a module's own forward, inside of all its hooks, and without a module around it: every name stays.

The module gets an attribute ``forward`` of its own, which hides its class's. Hooks, those of ``fully_shard`` included, run around it,
whichever came first. It refuses to know what runs there.

Note: code of its own. The compiler counts how often it has compiled a function, and gives up at eight times. So each class of
modules gets a copy of ``_traced``, as each has a forward of its own; what is ``outer`` runs outside of the graph.

Worked example, ``outer`` offloads what autograd saves, ``inner`` checkpoints

    block(x)    hooks of fully_shard( offload( checkpoint( Block.forward(block, x) ) ) )
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from .. import torch_compat as compat
from .sharded_class import original_class


class Around(Protocol):
    """What runs around a forward."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``forward(*args, **kwargs)`` returns. ``forward`` is the module's, or what else runs around that."""


@dataclass(frozen=True)
class AroundForward:
    """All that runs around one module's forward, from the outside to the inside.

    traced: runs ``inner`` and the forward
    own:    a forward that the module, not its class, had before
    outer:  outside of the graph, if the module is compiled
    middle: also
    inner:  what the compiler can trace
    """

    traced: Callable[..., Any]
    own: Callable[..., Any] | None
    outer: Around | None = None
    middle: Around | None = None
    inner: Around | None = None


_ATTRIBUTE = "_fsdp2_around_forward"


def around_forward(module: nn.Module) -> AroundForward:
    """What runs around the forward of ``module`` now."""
    found = vars(module).get(_ATTRIBUTE)
    if isinstance(found, AroundForward):
        return found
    cls = original_class(type(module)) if compat.module_state(module) is not None else type(module)
    return AroundForward(traced=_traced_for(cls), own=vars(module).get("forward"))


def put_around_forward(module: nn.Module, **places: Around) -> None:
    """Let the values of ``places``, which are names of ``AroundForward``, run there from now on."""
    changed = replace(around_forward(module), **places)  # type: ignore[arg-type]
    is_traced = changed.outer is None and changed.middle is None
    # Past the module's own ``__setattr__``.
    vars(module)[_ATTRIBUTE] = changed
    vars(module)["forward"] = types.MethodType(changed.traced if is_traced else _outside, module)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that all of it runs around."""
    around: Any = module._fsdp2_around_forward
    own: Callable[..., Any] | None = around.own
    return functools.partial(type(module).forward, module) if own is None else own


def _traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    around: Any = self._fsdp2_around_forward
    inner = around.inner
    forward = own_forward(self)
    return forward(*args, **kwargs) if inner is None else inner.run(self, forward, args, kwargs)


@functools.cache
def _traced_for(cls: type) -> Callable[..., Any]:
    name = f"forward of {cls.__qualname__}"
    code = _traced.__code__.replace(co_name=name)
    return types.FunctionType(code, globals(), name)


@compat.dynamo_skips
def _outside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    around: Any = self._fsdp2_around_forward
    run: Callable[..., Any] = functools.partial(around.traced, self)
    if around.middle is not None:
        run = functools.partial(_run, around.middle, self, run)
    return run(*args, **kwargs) if around.outer is None else around.outer.run(self, run, args, kwargs)


@compat.dynamo_skips
def _run(around: Around, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return around.run(module, forward, args, kwargs)
