"""What the passes of full-graph mode do to a graph, on graphs made by hand; no process group, no compiler."""

from __future__ import annotations

import torch
from torch import fx

from fsdp2.compiled.graph_order import reorder
from fsdp2.compiled.graph_summary import Collective, peak_nbytes, summary_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Drawn:
    """A graph drawn node by node; every value is fp32 and has ``numel`` elements."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def call(self, target, *args, numel: int = 256, name: str | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(numel, device="meta")
        return node

    def input(self, name: str, numel: int = 256) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(numel, device="meta")
        return node

    def gather(self, shard: fx.Node, name: str) -> fx.Node:
        cast = self.call(aten._to_copy.default, shard, numel=128, name=f"cast_{name}")
        start = self.call(c10d.all_gather_into_tensor.default, cast, 2, "0", name=f"gather_{name}")
        return self.call(c10d.wait_tensor.default, start, name=f"wait_{name}")

    def reduce(self, grad: fx.Node, name: str) -> fx.Node:
        start = self.call(c10d.reduce_scatter_tensor.default, grad, "sum", 2, "0", numel=128, name=f"reduce_{name}")
        wait = self.call(c10d.wait_tensor.default, start, numel=128, name=f"reduced_{name}")
        return self.call(aten.div.Tensor, wait, 2, numel=128, name=f"divided_{name}")

    def names(self) -> list[str]:
        return [node.name for node in self.graph.nodes if node.op == "call_function"]


def forward_of(*buckets: str) -> Drawn:
    drawn = Drawn()
    x, *shards = [drawn.input(name) for name in ("x", *(f"shard_{bucket}" for bucket in buckets))]
    for bucket, shard in zip(buckets, shards, strict=True):
        x = drawn.call(aten.mm.default, x, drawn.gather(shard, bucket), name=f"mm_{bucket}")
    drawn.graph.output(x)
    return drawn


def test_each_gather_starts_behind_the_wait_for_the_one_before():
    drawn = forward_of("a", "b", "c")
    reorder(drawn.graph)
    assert drawn.names() == [
        *("cast_a", "gather_a", "cast_b", "gather_b", "wait_a", "mm_a"),
        *("wait_b", "cast_c", "gather_c", "mm_b", "wait_c", "mm_c"),
    ]
    gathers = [Collective("all_gather", 1024, overlapped) for overlapped in (0, 1, 1)]
    assert summary_of(drawn.graph, "forward").collectives == tuple(gathers)


def test_a_gather_of_what_was_computed_stays_behind_it():
    drawn = Drawn()
    x, shard = drawn.input("x"), drawn.input("shard")
    first = drawn.call(aten.mm.default, x, drawn.gather(shard, "a"), name="mm")
    drawn.graph.output(drawn.gather(first, "of_activations"))
    before = drawn.names()
    reorder(drawn.graph)
    assert drawn.names() == before


def test_reductions_are_waited_for_when_the_next_one_starts():
    drawn = Drawn()
    grad = drawn.input("tangents_1")
    results = []
    for bucket in "abc":
        grad = drawn.call(aten.mm.default, grad, grad, name=f"mm_{bucket}")
        results.append(drawn.reduce(grad, bucket))
    drawn.graph.output(tuple(results))
    reorder(drawn.graph)
    assert drawn.names() == [
        *("mm_a", "reduce_a", "mm_b", "reduced_a", "divided_a", "reduce_b"),
        *("mm_c", "reduced_b", "divided_b", "reduce_c", "reduced_c", "divided_c"),
    ]


def test_both_legs_of_hybrid_sharding_are_waited_for_late():
    drawn = Drawn()
    grad = drawn.input("tangents_1")
    results = []
    for bucket in "ab":
        grad = drawn.call(aten.mm.default, grad, grad, name=f"mm_{bucket}")
        scattered = drawn.reduce(grad, bucket)
        start = drawn.call(c10d.all_reduce.default, scattered, "sum", "1", numel=128, name=f"sum_{bucket}")
        results.append(drawn.call(c10d.wait_tensor.default, start, numel=128, name=f"summed_{bucket}"))
    drawn.graph.output(tuple(results))
    reorder(drawn.graph)
    assert drawn.names() == [
        *("mm_a", "reduce_a", "mm_b", "reduced_a", "divided_a", "sum_a", "reduce_b"),
        *("reduced_b", "divided_b", "summed_a", "sum_b", "summed_b"),
    ]


def test_the_peak_counts_what_lives_at_a_time_and_no_view_twice():
    drawn = forward_of("a", "b")
    assert peak_nbytes(drawn.graph) == 3 * 1024  # mm_a, the gathered b, mm_b
    reorder(drawn.graph)
    assert peak_nbytes(drawn.graph) == 3 * 1024  # the gathered a and b, mm_a
