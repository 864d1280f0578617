"""Our passes in the form in which inductor takes them: the part of ``torch_compat`` that imports inductor, which takes seconds.

``torch_compat`` imports this file when it compiles. The classes stand at the top of a module, for inductor pickles them into the
keys of its caches. It refuses to know what the passes do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.dependencies import StarDep
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode

GraphPass = Callable[[torch.fx.Graph], None]


class Partition(CustomPartitionerFn):
    """``before`` on the joint graph, then inductor's own partitioner. before: a function at the top of a module."""

    def __init__(self, before: GraphPass, key: str) -> None:
        self._before = before
        self._key = key

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        self._before(gm.graph)
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._key


class LastPass(CustomGraphPass):
    """``change`` on each graph just before it is lowered."""

    def __init__(self, change: GraphPass, key: str) -> None:
        self._change = change
        self._key = key

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        self._change(graph)

    def uuid(self) -> str:
        return self._key


class KeepReadsBehindWaits(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]  # from torch 2.13 on
    """Before loops are fused: what reads the result of a collective stays behind the wait for it, for the C++ backend too.

    A wait counts as a change of the result in place: who reads it later reads it under a new name. Where the C++ backend gives two
    loops the same ranges to fuse them (``SchedulerNode.recompute_size_and_body``), it finds their reads again under the old names,
    and the fused loop may run before the wait (torch 2.11 to 2.13). It renames them again if there is a dependency that cannot be
    found in the loop's body, so each of these loops gets one.
    """

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        for node in nodes:
            if isinstance(node, SchedulerNode):
                for name in sorted(set(node.mutation_renames.values())):
                    node.add_fake_dep(StarDep(name))
        return nodes

    def uuid(self) -> str:
        return "fsdp2_keep_reads_behind_waits_1"
