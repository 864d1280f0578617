"""Nodes of autograd's graph around a call: the nodes below an output, and outputs that need a node of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..iteration.call import GraphPart


def apart_from(nodes: list[Any], output: Tensor) -> Tensor:
    """``output``; if one of ``nodes`` made it, a view of it with a node of its own."""
    return output.view_as(output) if output.grad_fn in nodes else output


def made_input(nodes: list[Any], node: Any) -> bool:
    """Whether an input is a view of what ``node`` made: then another module's backward runs it. nodes: of a call's inputs"""
    for each in nodes:
        edges = each.next_functions
        while len(edges) == 1 and edges[0][0] is not None:
            if edges[0][0] is node:
                return True
            edges = edges[0][0].next_functions
    return False


def below(node: Any) -> Any:
    """The first node below ``node`` that is not a leaf's; None if there is none."""
    return next((each for each, _ in node.next_functions if each is not None and each.next_functions), None)


def find_bottoms(part: GraphPart, nodes: list[Any]) -> None:
    """Give a call nodes that run with each of ``nodes``, those of its outputs, unless such a node is one of its inputs' nodes.

    Only leaves are below a bottom. So none of the nodes that hold the call is below a node that the call holds.
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
    """``output``; if its node is a bottom, a copy with a node above that."""
    base = output if output._base is None else output._base
    nodes = [node for node in (output.grad_fn, base.grad_fn) if node is not None]
    return output.clone() if any(below(node) is None for node in nodes) else output


def outlive_parameters(output: Tensor) -> Tensor:
    """Copy an output that is a parameter or a view of one: it would be freed with the parameters."""
    leaf = output if output._base is None else output._base
    return output.clone() if isinstance(leaf, nn.Parameter) else output
