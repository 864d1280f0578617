"""What captures graphs: private names and version differences of capturing, partitioning and inductor.

Importing this file imports no compiler; each function imports what it needs when it is called.
"""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def compiler_errors() -> tuple[type[Exception], ...]:
    """The errors that the compiler raises when it cannot capture or compile something."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def place_of(error: BaseException) -> str | None:
    """The line of the user's code at which the compiler stopped, as ``file:line in function: text``; None if it does not say."""
    ours = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
    stack = getattr(error, "real_stack", None) or ()
    frames = [frame for frame in stack if not frame.filename.startswith(ours)] or list(stack)
    if not frames:
        return None
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}"


def uninterrupted(function: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    """``torch.compile`` of a whole function into one graph, with compiled code and guards that it shares with no other function.

    The compiler files what it compiled by code object, and all closures of one function share one code object: without this, two
    modules of one class would get each other's graphs.
    """
    code = function.__code__
    own = types.FunctionType(code.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(own, backend=backend, fullgraph=True, dynamic=dynamic)


def fake_like(tensor: Tensor, placeholders: list[Any]) -> Tensor:
    """A stand-in for ``tensor`` in a graph that the compiler captured with ``placeholders``; its sizes are constants there."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("example_value") for node in placeholders])
    assert mode is not None
    return mode.from_tensor(tensor, static_shapes=True)


def name_input(node: torch.fx.Node) -> None:
    """Let the compiler take ``node``, our placeholder, for one that it captured."""
    from torch._dynamo.source import SyntheticLocalSource

    node._dynamo_source = SyntheticLocalSource(node.name)


def copy_capture(captured: torch.fx.GraphModule, graph: torch.fx.Graph, copies: dict[torch.fx.Node, torch.fx.Node]) -> Any:
    """A module of ``graph``, which holds copies of the captured nodes, that the compiler takes for its own."""
    for node, own in copies.items():
        if hasattr(node, "_dynamo_source") and own.op == "placeholder":
            own._dynamo_source = node._dynamo_source
    module: Any = torch.fx.GraphModule(captured, graph)
    module.meta = dict(captured.meta)
    module._param_name_to_source = getattr(captured, "_param_name_to_source", {})
    return module


RECOMPUTED_GATHER = 100_000
"""The region id of what we mark: above those of the user's checkpointed regions, so that a region never makes us save a gather."""


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"

_COLLECTIVES = {
    "_c10d_functional::all_gather_into_tensor": ALL_GATHER,
    "_c10d_functional::all_gather_into_tensor_out": ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor": REDUCE_SCATTER,
    "_c10d_functional::all_reduce": ALL_REDUCE,
    "_c10d_functional::all_reduce_": ALL_REDUCE,
}


def functional_all_gather(shard: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """(n,) of every rank, one after another: (W * n,). Collective: yes, as a node of the graph that is traced, or now."""
    return wait_for(torch.ops._c10d_functional.all_gather_into_tensor(shard, process_group.size(), process_group.group_name))


def functional_reduce_scatter(tensor: Tensor, operation: str, process_group: dist.ProcessGroup) -> Tensor:
    """This rank's (n,) of the reduced (W * n,). operation: "sum" or "avg". Collective: as above."""
    start = torch.ops._c10d_functional.reduce_scatter_tensor
    return wait_for(start(tensor, operation, process_group.size(), process_group.group_name))


def functional_all_reduce(tensor: Tensor, operation: str, process_group: dist.ProcessGroup) -> Tensor:
    """The reduced tensor, a new one. Collective: as above."""
    return wait_for(torch.ops._c10d_functional.all_reduce(tensor, operation, process_group.group_name))


def wait_for(started: Tensor) -> Tensor:
    """``started``, valid. For what ``register_work`` was called with, in the graph that is traced, or now."""
    return torch.ops._c10d_functional.wait_tensor(started)  # type: ignore[no-any-return]


def note_collective(operator: str, kind: str) -> None:
    """Tell the compiler that our ``operator`` starts a collective: ALL_GATHER, REDUCE_SCATTER or ALL_REDUCE."""
    _COLLECTIVES[operator] = kind


def register_work(result: Tensor, work: dist.Work) -> None:
    """Let the graph's wait for ``result`` wait for ``work`` too."""
    torch._C._distributed_c10d._register_work(result, work)


def process_group_named(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def collective_of(node: torch.fx.Node) -> str | None:
    """Which collective a node of a graph starts, if it starts one."""
    return _COLLECTIVES.get(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else None


def is_wait(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == "_c10d_functional::wait_tensor"


def size_hint(numel: Any) -> int:
    """``numel``, or the number that a symbolic size had when the graph was captured."""
    return numel if isinstance(numel, int) else int(numel.node.hint)


def mark_recomputed(node: torch.fx.Node, recomputed: bool) -> None:
    """Whether backward computes what ``node`` stands for again (with the operators that it is traced to), or finds it saved."""
    policy = torch.utils.checkpoint.CheckpointPolicy
    node.meta["recompute"] = policy.MUST_RECOMPUTE if recomputed else policy.MUST_SAVE
    node.meta["ac_graph_id"] = RECOMPUTED_GATHER


def is_marked_recomputed(node: torch.fx.Node) -> bool:
    policy = torch.utils.checkpoint.CheckpointPolicy
    return node.meta.get("ac_graph_id") == RECOMPUTED_GATHER and node.meta.get("recompute") == policy.MUST_RECOMPUTE


def is_of_backward(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


GraphPass = Callable[[torch.fx.Graph], None]


def aot_eager(
    module: torch.fx.GraphModule, inputs: list[Any], before_partition: GraphPass, on_graph: Callable[[torch.fx.Graph, str], None]
) -> Callable[..., Any]:
    """Differentiate a captured graph and run the result operator by operator.

    before_partition: changes the joint graph; on_graph: gets each final graph, which it may change, and its kind: "forward",
                      "backward" or "inference"
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        before_partition(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def compiler(kind: str) -> Callable[..., Any]:
        def run_as_it_is(graph_module: Any, example_inputs: Any) -> Any:
            on_graph(graph_module.graph, kind)
            graph_module.recompile()

            def run(args: list[Any]) -> Any:
                return torch.fx.Interpreter(graph_module).boxed_run(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return run_as_it_is

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(module, inputs)


def inductor(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    options: dict[str, Any],
    before_partition: GraphPass,
    last_pass: GraphPass | None,
    on_graph: Callable[[torch.fx.Graph, str], None],
    key: str,
) -> Callable[..., Any]:
    """Differentiate and compile a captured graph.

    before_partition: changes the joint graph; last_pass: changes each graph just before it is lowered; on_graph: sees a copy of
                      each graph before the compiler's own passes, and its kind
    key:              of the two passes, for the compiler's caches
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from .inductor_passes import KeepReadsBehindWaits, LastPass, Partition

    def inner_compile(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        on_graph(copy.deepcopy(graph_module.graph), kind)
        return compile_fx_inner(graph_module, example_inputs, **kwargs)

    patches: dict[str, Any] = {
        "custom_partitioner_fn": Partition(before_partition, key),
        "_pre_fusion_custom_pass": KeepReadsBehindWaits(),
    }
    if last_pass is not None:
        patches["post_grad_custom_post_pass"] = LastPass(last_pass, key)
        patches["reorder_for_peak_memory"] = False  # it would undo our order: values that are gathered ahead of their use cost memory
    patches |= options
    return compile_fx(module, inputs, inner_compile=inner_compile, config_patches=patches)  # type: ignore[return-value]
