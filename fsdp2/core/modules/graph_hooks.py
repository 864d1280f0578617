"""Hooks before nodes of autograd's graph around a call: each tells the schedule which moment of backward has come.

``hooks.py`` registers them in forward, and knows why before these nodes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_names import torch_autograd, torch_compiler
from ..iteration.call import Call, GraphPart
from ..iteration.module_state import ModuleState


@contextlib.contextmanager
def labelled(moment: str, unit: ModuleState) -> Iterator[None]:
    """Label the moment for the profiler, outside of transforms of ``torch.func``: all of them share the parameters."""
    with torch.profiler.record_function(f"fsdp2::{moment} ({unit.fqn})"), torch_autograd.functorch_disabled():
        yield


@torch_compiler.dynamo_disabled
def begin_backward(unit: ModuleState, part: GraphPart, grads: Any) -> None:
    """Before the node of an output: its gradient has arrived."""
    schedule = unit.schedule
    assert schedule is not None
    if torch_autograd.profiler_is_on() or torch_autograd.functorch_is_active():
        with labelled("pre_backward", unit):
            schedule.begin_backward(part.call, unit)
    else:
        schedule.begin_backward(part.call, unit)


@torch_compiler.dynamo_disabled
def end_backward(unit: ModuleState, call: Call, grads: Any) -> None:
    """Before the node of an input: its gradient is done, and no module of the unit comes after in this call."""
    schedule = unit.schedule
    assert schedule is not None
    if torch.is_grad_enabled():
        _watch_gradients(unit, call, grads)
    if torch_autograd.profiler_is_on() or torch_autograd.functorch_is_active():
        with labelled("post_backward", unit):
            schedule.end_backward_of(call, unit)
    else:
        schedule.end_backward_of(call, unit)


@torch_compiler.dynamo_disabled
def pass_input(unit: ModuleState, call: Call, grads: Any) -> None:
    """Autograd has computed the gradient of an input that does not end the call."""
    if torch.is_grad_enabled():
        _watch_gradients(unit, call, grads)


def _watch_gradients(unit: ModuleState, call: Call, grads: tuple[Tensor | None, ...]) -> None:
    """A backward with ``create_graph`` made a graph: a backward through it needs the parameters from here on."""
    part = call.graph()
    if part is None:
        return
    for grad in grads:
        for each in () if grad is None else torch_autograd.levels_of(grad):
            if each.grad_fn is not None:
                each.grad_fn.register_prehook(functools.partial(_begin_backward_through_backward, unit, part))


@torch_compiler.dynamo_disabled
def _begin_backward_through_backward(unit: ModuleState, part: GraphPart, grads: Any) -> None:
    begin_backward(unit, part, grads)
    schedule = unit.schedule
    if schedule is not None and schedule.backward is not None:
        schedule.backward.keep_to_end(unit)


# --- which nodes ------------------------------------------------------------------------------------------------------


def apart_from(nodes: list[Any], output: Tensor) -> Tensor:
    """``output``; if one of ``nodes`` made it, a view of it with a node of its own."""
    return output.view_as(output) if output.grad_fn in nodes else output


def made_input(nodes: list[Any], node: Any) -> bool:
    """Whether an input is a view made by ``node``, so that another module's backward runs it. nodes: of the inputs"""
    for each in nodes:
        edges = each.next_functions
        while len(edges) == 1 and edges[0][0] is not None:
            if edges[0][0] is node:
                return True
            edges = edges[0][0].next_functions
    return False


def below(node: Any) -> Any:
    """The first node below ``node`` that is not a leaf's; None if there is none."""
    for each, _ in node.next_functions:
        if each is not None and each.next_functions:
            return each
    return None


def find_bottoms(part: GraphPart, nodes: list[Any]) -> None:
    """Note a *bottom* of the call for each of ``nodes``, its outputs' nodes: a node below it with only leaves below.

    Backward runs the bottom whenever it runs the output's node. A path down that reaches an input's node has no bottom.
    With only leaves below, the nodes that reference the call never form a cycle with it.
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
