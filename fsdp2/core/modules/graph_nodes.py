"""Nodes of autograd's graph around a call: which are below an output, and outputs that need a node of their own.

It refuses to know hooks, and when a backward begins.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..iteration.call import GraphPart


def apart_from(nodes: list[Any], output: Tensor) -> Tensor:
    """``output``, or where one of ``nodes`` made it, a view with a node of its own."""
    return output.view_as(output) if output.grad_fn in nodes else output


def made_input(nodes: list[Any], node: Any) -> bool:
    """Whether ``node`` made what one of ``nodes``, those of a call's inputs, is a view of: then another module's backward runs it."""
    for each in nodes:
        edges = each.next_functions
        while len(edges) == 1 and edges[0][0] is not None:
            if edges[0][0] is node:
                return True
            edges = edges[0][0].next_functions
    return False


def below(node: Any) -> Any:
    """The first node below ``node`` that is not a leaf's, if there is one."""
    return next((each for each, _ in node.next_functions if each is not None and each.next_functions), None)


def find_bottoms(part: GraphPart, nodes: list[Any]) -> None:
    """Give a call a node that runs with each of ``nodes``, those of its outputs, unless that is one of its inputs' nodes.

    A bottom has only leaves below it: so none of the nodes that hold the call is below what the call holds.
    """
    passed = set(part)
    for node in nodes:
        while node not in passed:
            passed.add(node)
            following = below(node)
            if following is None:
                part.bottoms.append(node)
                break
            node = following


def apart_from_bottom(output: Tensor) -> Tensor:
    """``output``, or where its node is a bottom, a copy with a node above that."""
    base = output if output._base is None else output._base
    nodes = [node for node in (output.grad_fn, base.grad_fn) if node is not None]
    return output.clone() if any(below(node) is None for node in nodes) else output


def outlive_parameters(output: Tensor) -> Tensor:
    """A parameter that is an output, or a view of one, is freed with the parameters: copy it."""
    leaf = output if output._base is None else output._base
    return output.clone() if isinstance(leaf, nn.Parameter) else output
