"""Where the collectives stand in a graph: gathers start early, reductions are waited for late; and what backward computes again.

Traced as written, each gather is waited for right where it starts, so that nothing overlaps. Here the start of each gather is
moved after the wait for the gather before it: while the compute of one bucket runs, the next bucket is on its way, and never
more than one (the first two start together, when nothing computes yet). A reduction is waited for when the next one is about to
start, or at the end. It is the order of eager mode, as a pass over an FX graph.

Worked example, backward of two blocks (G gather, R reduce-scatter, each a start and a wait):

    as traced   G2 wait, block 2, R2 wait, G1 wait, block 1, R1 wait
    reordered   start G2, start G1, wait G2, block 2, start R2, wait G1, block 1, wait R2, R1 wait
"""

from __future__ import annotations

import torch
from torch import fx

from . import torch_names as compiler

_VIEWS_AND_CASTS = frozenset(
    {
        "aten::view",
        "aten::_unsafe_view",
        "aten::reshape",
        "aten::t",
        "aten::transpose",
        "aten::permute",
        "aten::expand",
        "aten::slice",
        "aten::select",
        "aten::squeeze",
        "aten::unsqueeze",
        "aten::clone",
        "aten::alias",
        "aten::detach",
        "aten::_to_copy",
        "prims::convert_element_type",
    }
)


def mark_what_follows_gathers(graph: fx.Graph) -> None:
    """Let backward compute again, in a joint graph, what is only a view, copy or cast of a parameter that it gathers again.

    Else the partitioner could save such a view, and with it the whole unsharded parameter.
    """
    for node in graph.nodes:
        if node.op != "call_function" or "recompute" in node.meta or compiler.is_of_backward(node):
            continue
        if operator_name(node) in _VIEWS_AND_CASTS and all(compiler.is_marked_recomputed(each) for each in node.all_input_nodes):
            compiler.mark_recomputed(node, True)


def reorder(graph: fx.Graph) -> None:
    """Move the starts of gathers ahead and the waits for reductions back, in place. Gathers that depend on compute stay."""
    _delay_copies(graph)
    _advance_gathers(graph)
    for kind in (compiler.REDUCE_SCATTER, compiler.ALL_REDUCE):
        _delay_waits(graph, kind)
    graph.lint()


def _delay_copies(graph: fx.Graph) -> None:
    """Put each wait for a gather, and each view or copy of its result, right before its first use.

    The compiler's passes may have moved them: with one copy early, its whole bucket is waited for and alive early.
    """
    gathered: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if compiler.is_wait(node):
            if compiler.collective_of(inputs[0]) == compiler.ALL_GATHER and _from_placeholders(inputs[0]) is not None:
                gathered.add(node)
        elif inputs and operator_name(node) in _VIEWS_AND_CASTS and gathered.issuperset(inputs):
            gathered.add(node)
    for node in reversed(list(graph.nodes)):
        users = [user for user in node.users if user.op != "output"]
        if node in gathered and users:
            min(users).prepend(node)


def _advance_gathers(graph: fx.Graph) -> None:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    previous = placeholders[-1] if placeholders else None
    for start in [node for node in graph.nodes if compiler.collective_of(node) == compiler.ALL_GATHER]:
        wait = wait_of(start)
        preparation = _from_placeholders(start)
        if wait is None or preparation is None:
            continue
        if previous is not None and previous < wait:
            at = previous
            for node in [*preparation, start]:
                at.append(node)
                at = node
        previous = start if previous is None or previous.op == "placeholder" else wait


def _from_placeholders(start: fx.Node) -> list[fx.Node] | None:
    """The nodes that ``start`` is computed from, in order, if they are cheap and come from inputs of the graph alone; else None."""
    needed: set[fx.Node] = set()
    left = list(start.all_input_nodes)
    while left:
        node = left.pop()
        if node.op == "placeholder" or node in needed:
            continue
        if operator_name(node) not in _VIEWS_AND_CASTS | {"aten::cat"}:
            return None
        needed.add(node)
        left += node.all_input_nodes
    return [node for node in start.graph.nodes if node in needed] if needed else []


def _delay_waits(graph: fx.Graph, kind: str) -> None:
    starts = [node for node in graph.nodes if compiler.collective_of(node) == kind]
    if not starts:
        return
    output = next(node for node in graph.nodes if node.op == "output")
    for start, following in zip(starts, [*starts[1:], output], strict=True):
        wait = wait_of(start)
        if wait is None:
            continue
        late = _depending_on(wait, until=following)
        if late is None:
            continue
        for node in late:
            following.prepend(node)


def _depending_on(wait: fx.Node, until: fx.Node) -> list[fx.Node] | None:
    """``wait`` and all before ``until`` that depends on it, in order; None if ``until`` does so (the output may), or it is after."""
    found = [wait]
    seen = {wait}
    node = wait.next
    while node is not until:
        if node.op == "root":
            return None
        if any(each in seen for each in node.all_input_nodes):
            found.append(node)
            seen.add(node)
        node = node.next
    return None if until.op != "output" and any(each in seen for each in until.all_input_nodes) else found


def wait_of(start: fx.Node) -> fx.Node | None:
    return next((user for user in start.users if compiler.is_wait(user)), None)


def operator_name(node: fx.Node) -> str:
    """``"aten::mm"``; the name of the function if it is no operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    return str(getattr(target, "__name__", target))
