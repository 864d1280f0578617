"""Count what the compiler does: graphs, graph breaks, and compilations where there should be none any more.

with counted_compilations() as counts:
    block.compile(backend=counts.backend)
    ...two steps...
    with no_recompilation():
        ...more steps...
assert counts.graphs == 1
assert counts.breaks == 0
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters


class Counts:
    """``backend`` hands every graph on to the backend of this name; ``num_ops`` are the operations in all graphs together."""

    def __init__(self, name: str) -> None:
        self.graphs = 0
        self.num_ops = 0
        self._compile: Callable[..., Any] = lookup_backend(name)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        self.graphs += 1
        self.num_ops += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return self._compile(graph, inputs, **options)

    @property
    def breaks(self) -> int:
        return sum(counters["graph_break"].values())


@contextlib.contextmanager
def counted_compilations(name: str = "eager") -> Iterator[Counts]:
    """Nothing is compiled when it begins, and nothing is left compiled behind it."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield Counts(name)
    finally:
        torch._dynamo.reset()


def no_recompilation() -> contextlib.AbstractContextManager[Any]:
    """Inside, code that is compiled a second time is an error."""
    return torch._dynamo.config.patch(error_on_recompile=True)
