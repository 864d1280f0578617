"""The compiler backend of full-graph mode: from what was captured to what runs, through one of torch's own backends."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from . import graph_order
from . import torch_names as compiler
from .graph_summary import GraphSummary, summary_of
from .rewriting import Rewritten, rewritten
from .stand_ins import Face

BACKENDS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class CompileOptions:
    """The arguments of ``compile``, checked.

    backend:        one of BACKENDS
    bucket_nbytes:  unsharded size up to which groups are merged into one bucket
    reorders:       whether our own pass decides where collectives stand
    inductor:       settings of inductor, by name
    """

    backend: str = "inductor"
    bucket_nbytes: int = 0
    dynamic: bool | None = None
    reorders: bool = True
    inductor: dict[str, Any] = field(default_factory=dict)


def compiled_graph(
    captured: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    faces: Sequence[Face],
    keeps: Callable[[Face], bool],
    options: CompileOptions,
    note: Callable[[GraphSummary], None],
) -> tuple[Rewritten, Callable[..., Any]]:
    """The captured graph over shards, and what runs it. note: is told of each graph that results."""
    new = rewritten(captured, inputs, faces, keeps, options.bucket_nbytes)

    def on_graph(graph: fx.Graph, kind: str) -> None:
        if options.reorders:
            graph_order.reorder(graph)
        note(summary_of(graph, kind))

    if options.backend == "aot_eager":
        return new, compiler.aot_eager(new.module, new.inputs, graph_order.mark_what_follows_gathers, on_graph)
    last_pass = graph_order.reorder if options.reorders else None
    run = compiler.inductor(
        new.module, new.inputs, dict(options.inductor), graph_order.mark_what_follows_gathers, last_pass, on_graph, _key_of_passes()
    )
    return new, run


@functools.cache
def _key_of_passes() -> str:
    """Changes whenever our passes do, so that the compiler's caches forget what they made with older ones."""
    return hashlib.sha256(inspect.getsource(graph_order).encode()).hexdigest()
