"""Full-graph mode: forward, backward and all collectives of a sharded model captured in one graph.

    fsdp2.compile(model)     # after fully_shard; the first forward captures
    model(x).sum().backward(); optimizer.step()     # the same parameters, gradients, state dicts and checkpoints
    fsdp2.uncompile(model)   # eager again

Files in the order of a parameter's way into the graph: ``face`` (what the compiler sees of a group), ``bucket`` (groups that travel
together, as traced operators), ``rewriting`` (the captured graph over shards), ``order`` (where collectives stand), ``summary``
(what a graph does), ``backend``, ``mode`` (the life of the mode), ``api``.
"""

from .api import compile, graph_summaries, uncompile  # noqa: A004 (named after torch.compile)
from .summary import Collective, GraphSummary

__all__ = ["Collective", "GraphSummary", "compile", "graph_summaries", "uncompile"]
