"""Which modules become groups: policies that choose, a dry run that shows, and wrapping by hand during construction.

    print(plan(model, by_class(Block)))                     # what parallelize(model, wrap=by_class(Block)) would do; no process group
    parallelize(model, wrap=by_size(50_000_000))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(wrap(Block()) for _ in range(12))
            self.head = nn.Linear(512, 10)

    with enable_wrap(strategy="hsdp", shard_size=8):
        model = wrap(Net())        # the outermost module last: it takes what is left

A policy is a small value; the shorthands are "auto", None (the root alone), and a set, list or tuple of module classes.
Outside of ``enable_wrap``, ``wrap`` returns its argument as it is, so that the same class also makes an unsharded model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

from .grouping.planning import Plan, PlannedGroup, plan
from .grouping.policies import WrapPolicy, auto, by_class, by_name, by_predicate, by_size, root_only
from .strategy import StrategyName, parallelize

__all__ = [
    "Plan",
    "PlannedGroup",
    "WrapPolicy",
    "auto",
    "by_class",
    "by_name",
    "by_predicate",
    "by_size",
    "enable_wrap",
    "plan",
    "root_only",
    "wrap",
]

_Module = TypeVar("_Module", bound=nn.Module)

_options: ContextVar[dict[str, Any] | None] = ContextVar("fsdp2_wrap_options", default=None)


@contextlib.contextmanager
def enable_wrap(strategy: StrategyName = "zero3", **options: Any) -> Iterator[None]:
    """Inside, ``wrap`` shards modules by ``strategy`` and the other arguments of ``fsdp2.parallelize``, in this thread alone.

    Nested contexts replace each other. Collective: no; see ``wrap``.
    Source: the context manager of the same name in torch.distributed.fsdp.wrap.

    Example:
        with fsdp2.wrap.enable_wrap("zero3"):
            for block in net:
                fsdp2.wrap.wrap(block)
            fsdp2.wrap.wrap(net)
    """
    token = _options.set({"strategy": strategy, **options})
    try:
        yield
    finally:
        _options.reset(token)


def wrap(module: _Module, **overrides: Any) -> _Module:
    """Inside ``enable_wrap``: make the parameters of ``module`` that no earlier call took one group; elsewhere a no-op.

    overrides:  arguments of ``fsdp2.parallelize`` that differ from those of ``enable_wrap``
    Returns:    ``module`` itself
    Collective: the first time for a mesh, and where ``sync_module_states`` broadcasts.

    Example:
        with fsdp2.wrap.enable_wrap("zero2"):
            fsdp2.wrap.wrap(net)
    """
    options = _options.get()
    if options is None:
        return module
    return parallelize(module, **{"wrap": None, **options, **overrides})
