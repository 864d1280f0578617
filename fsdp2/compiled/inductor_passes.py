"""Our passes in the form in which inductor takes them: the part of ``torch_names`` that imports inductor, which takes seconds.

``torch_names`` imports this file when it compiles. The classes stand at the top of a module, for inductor pickles them into the
keys of its caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.dependencies import Dep, StarDep, WeakDep
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch.utils._ordered_set import OrderedSet

GraphPass = Callable[[torch.fx.Graph], None]


class _Keyed:
    """change: a function at the top of a module; key: of it, for the compiler's caches"""

    def __init__(self, change: GraphPass, key: str) -> None:
        self._change = change
        self._key = key

    def uuid(self) -> str:
        return self._key


class Partition(_Keyed, CustomPartitionerFn):
    """``change`` on the joint graph, then inductor's own partitioner."""

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        self._change(gm.graph)
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


class LastPass(_Keyed, CustomGraphPass):
    """``change`` on each graph just before it is lowered."""

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        self._change(graph)


class KeepReadsBehindWaits(getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)):  # type: ignore[misc]  # torch 2.13
    """Before loops are fused: what reads the result of a collective stays after the wait for it, for the C++ backend too.

    A wait counts as a change of the result in place: who reads it later reads it under a new name. Where the C++ backend gives two
    loops the same ranges to fuse them, it finds out again what they read, under the old names (torch 2.11 to 2.13), and the fused
    loop may run before the wait. Here they get the new names back.
    """

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        for node in nodes:
            if isinstance(node, SchedulerNode) and node.mutation_renames:
                recompute = functools.partial(_recompute, node, node.recompute_size_and_body)
                node.recompute_size_and_body = recompute  # type: ignore[method-assign]
        return nodes

    def uuid(self) -> str:
        return "fsdp2_keep_reads_behind_waits_1"


def _recompute(node: SchedulerNode, recompute: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # These stand for an order that no loop shows.
    in_no_loop: OrderedSet[Dep] = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, (StarDep, WeakDep)))
    recompute(*args, **kwargs)
    node.set_read_writes(node.read_writes.with_read(in_no_loop).rename(node.mutation_renames))
