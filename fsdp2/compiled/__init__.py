"""Full-graph mode: forward, backward and all collectives of a sharded model captured in one graph.

    fsdp2.compile(model)     # after fully_shard; the first forward captures
    model(x).sum().backward(); optimizer.step()     # the same parameters, gradients, state dicts and checkpoints
    fsdp2.uncompile(model)   # eager again

Files in the order of a parameter's way into the graph: ``stand_ins`` (what the compiler sees of a group), ``bucket`` (groups that
travel together, as traced operators), ``rewriting`` (the captured graph over shards), ``graph_order`` (where collectives stand),
``graph_summary`` (what a graph does), ``backend``, ``full_graph_mode`` (the life of the mode), ``api``.
"""

from .api import compile, graph_summaries, uncompile  # noqa: A004 (named after torch.compile)
from .graph_summary import Collective, GraphSummary

__all__ = ["Collective", "GraphSummary", "compile", "graph_summaries", "uncompile"]
