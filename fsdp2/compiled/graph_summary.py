"""A summary of a captured graph: its collectives, their sizes, the operations between start and wait, and its peak of memory.

Read off the FX graph that is handed to the code generator, so it is the same on every machine and needs no clock.

Worked example: a forward graph of four blocks, a bucket each, says

    forward: 4 all-gathers (4 x 1.2 MiB), 3 of them overlap 6 heavy operators each; peak 9.1 MiB
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from . import torch_names as compiler
from .graph_order import operator_name, wait_of

_HEAVY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear", "matmul")


@dataclass(frozen=True)
class Collective:
    """kind: all_gather, reduce_scatter or all_reduce; nbytes: of its unsharded side
    overlapped: matrix multiplications, convolutions and attentions between its start and its wait
    """

    kind: str
    nbytes: int
    overlapped: int


@dataclass(frozen=True, repr=False)
class GraphSummary:
    """kind: forward, backward or inference

    collectives:   in the order in which they are waited for
    num_heavy:     matrix multiplications, convolutions and attentions
    peak_nbytes:   most bytes of values that the graph itself makes, alive at a time
    output_nbytes: of those, what it returns; a forward graph returns what it saves for backward as well
    """

    kind: str
    collectives: tuple[Collective, ...]
    num_heavy: int
    peak_nbytes: int
    output_nbytes: int

    def __repr__(self) -> str:
        counts = Counter(each.kind for each in self.collectives)
        collectives = ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "no collectives"
        return f"GraphSummary({self.kind}: {collectives}, {self.num_heavy} heavy operators, peak {self.peak_nbytes:,} bytes)"

    def count(self, kind: str) -> int:
        return sum(each.kind == kind for each in self.collectives)


def summary_of(graph: fx.Graph, kind: str) -> GraphSummary:
    collectives = []
    heavy = 0
    opened: dict[fx.Node, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        name = compiler.collective_of(node)
        if name is not None:
            wait = wait_of(node)
            if wait is not None:
                opened[wait] = (node, heavy)
        elif compiler.is_wait(node) and node in opened:
            start, before = opened.pop(node)
            started_as = compiler.collective_of(start)
            assert started_as is not None
            side = start.all_input_nodes[0] if started_as == compiler.REDUCE_SCATTER else start
            collectives.append(Collective(started_as, _nbytes(side), heavy - before))
        elif is_heavy(node):
            heavy += 1
    return GraphSummary(kind, tuple(collectives), heavy, peak_nbytes(graph), output_nbytes(graph))


def is_heavy(node: fx.Node) -> bool:
    name = operator_name(node).rpartition("::")[2]
    return node.op == "call_function" and (name in _HEAVY or "attention" in name)


def peak_nbytes(graph: fx.Graph) -> int:
    """The most bytes alive at a time among what the nodes make, each freed after its last use; inputs do not count, outputs do."""
    owner = _owners(graph)
    last_use: dict[fx.Node, int] = {}
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        for used in (*node.all_input_nodes, node):
            last_use[owner[used]] = index
    ends: dict[int, list[fx.Node]] = {}
    for node, index in last_use.items():
        ends.setdefault(index, []).append(node)
    alive = peak = 0
    for index, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            alive += _nbytes(node)
            peak = max(peak, alive)
        alive -= sum(_nbytes(ended) for ended in ends.get(index, ()) if ended.op == "call_function")
    return peak


def output_nbytes(graph: fx.Graph) -> int:
    """Bytes of what nodes made and the graph returns, each once, views as what they are views of."""
    owner = _owners(graph)
    output = next(node for node in graph.nodes if node.op == "output")
    returned = {owner[node] for node in output.all_input_nodes}
    return sum(_nbytes(node) for node in returned if node.op == "call_function")


def _owners(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the node whose memory its value lies in: itself, or the node that it is a view of."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        owner[node] = owner[node.all_input_nodes[0]] if _is_view(node) and node.all_input_nodes else node
    return owner


def _is_view(node: fx.Node) -> bool:
    if compiler.is_wait(node) or operator_name(node) == "getitem":
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(
        each.alias_info is not None and not each.alias_info.is_write for each in target._schema.returns
    )


def _nbytes(node: fx.Node) -> int:
    return sum(compiler.size_hint(each.numel()) * each.dtype.itemsize for each in _tensors(node.meta.get("val")))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
