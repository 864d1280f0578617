"""Hooks before nodes of autograd's graph: each tells the schedule which moment of a unit's backward has come.

``hooks.py`` registers them in forward, and knows why before these nodes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import torch_compat as compat
from ..iteration.call import Call, GraphPart
from ..iteration.module_state import ModuleState


@contextlib.contextmanager
def labelled(moment: str, unit: ModuleState) -> Iterator[None]:
    """Label the moment for the profiler, outside of any transform of ``torch.func``: parameters are the same to all of them."""
    with torch.profiler.record_function(f"fsdp2::{moment} ({unit.fqn})"), compat.functorch_disabled():
        yield


@compat.dynamo_disabled
def begin_backward(unit: ModuleState, part: GraphPart, grads: Any) -> None:
    """Before the node of an output: its gradient has arrived."""
    schedule = unit.schedule
    assert schedule is not None
    if compat.profiler_is_on() or compat.functorch_is_active():
        with labelled("pre_backward", unit):
            schedule.begin_backward(part.call, unit)
    else:
        schedule.begin_backward(part.call, unit)


@compat.dynamo_disabled
def end_backward(unit: ModuleState, call: Call, grads: Any) -> None:
    """Before the node of an input: its gradient is done, and no module of the unit comes behind in this call."""
    schedule = unit.schedule
    assert schedule is not None
    if torch.is_grad_enabled():
        _watch_gradients(unit, call, grads)
    if compat.profiler_is_on() or compat.functorch_is_active():
        with labelled("post_backward", unit):
            schedule.end_backward_of(call, unit)
    else:
        schedule.end_backward_of(call, unit)


@compat.dynamo_disabled
def pass_input(unit: ModuleState, call: Call, grads: Any) -> None:
    """Autograd has computed the gradient of an input that does not end the call."""
    if torch.is_grad_enabled():
        _watch_gradients(unit, call, grads)


def _watch_gradients(unit: ModuleState, call: Call, grads: tuple[Tensor | None, ...]) -> None:
    """A backward with ``create_graph`` made a graph: a backward through that graph needs the parameters from here on."""
    part = call.graph()
    if part is None:
        return
    for grad in grads:
        for each in () if grad is None else compat.levels_of(grad):
            if each.grad_fn is not None:
                each.grad_fn.register_prehook(functools.partial(_begin_backward_through_backward, unit, part))


@compat.dynamo_disabled
def _begin_backward_through_backward(unit: ModuleState, part: GraphPart, grads: Any) -> None:
    begin_backward(unit, part, grads)
    schedule = unit.schedule
    if schedule is not None and schedule.backward is not None:
        schedule.backward.keep_to_end(unit)
