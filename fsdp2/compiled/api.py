"""``compile`` and ``uncompile``, which users call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from ..arguments import NATURAL, SWITCH, require
from ..core.iteration.module_state import ModuleState, unit_of, units_below
from ..errors import ArgumentError, ModuleError, OrderError, got
from .backend import BACKENDS, CompileOptions
from .full_graph_mode import FullGraph
from .graph_summary import GraphSummary
from .refusals import refuse_what_graphs_lack

_Module = TypeVar("_Module", bound=nn.Module)


def compile(  # noqa: A001 (named after torch.compile)
    model: _Module,
    *,
    backend: str = "inductor",
    bucket_bytes: int = 4 << 20,
    reorder: bool = True,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> _Module:
    """Let ``model`` run in full-graph mode: forward, backward and all collectives captured in one graph.

    The first forward captures; parameters, gradients, state dicts, checkpoints and the optimizer are those of eager mode. Backward
    gathers a unit again if its ``reshard_after_forward`` is True or an int.
    Every backward reduces: with ``set_requires_gradient_sync(False)`` gradients accumulate sharded, and their sum is the same.

    model:          the root that ``fully_shard`` was applied to, on a 1-D or a (replicate, shard) mesh
    backend:        "inductor", or "aot_eager", which runs the captured graphs operator by operator
    bucket_bytes:   units are merged into one collective while their unsharded parameters together stay within this many bytes;
                    0: every unit has its own. Merged units are gathered and freed together.
    reorder:        start each gather one bucket ahead of its use and wait for each reduction as late as the next one; False leaves
                    the order to the compiler (``options`` can switch its own passes on)
    dynamic:        as in ``torch.compile``: None marks sizes as dynamic when they change
    options:        settings of inductor
    Returns:        ``model``
    Collective:     no. The first forward is, also where it fails: then CompileError is raised on every rank, naming the place, and
                    the model runs eagerly from then on.
    Raises:         CompileError if a part of the model cannot be in a graph; ModuleError, OrderError, ArgumentError
    Source:         SimpleFSDP (Zhang et al. 2024), for parameters that are computed in the graph. Here the graph of the unsharded
                    model is captured and its parameter inputs are then replaced, a unit's flat shard at a time.

    Example:
        fsdp2.compile(model, backend="aot_eager")
        model(x).sum().backward()  # the first forward captures
    """
    _check_options(backend, bucket_bytes, options)
    require("fsdp2.compile", SWITCH, reorder=reorder)
    require("fsdp2.compile", SWITCH.or_none, dynamic=dynamic)
    root = _root_of(model, "compile")
    if model._compiled_call_impl is not None:
        raise OrderError(
            f"this {type(model).__name__} is compiled already",
            expected="one of model.compile() and fsdp2.compile(model), once",
            fix="call fsdp2.uncompile(model) before, or leave out model.compile()",
        )
    _refuse_modes_below(model)
    refuse_what_graphs_lack([unit for _, unit in units_below(model)])
    chosen = CompileOptions(backend, bucket_bytes, dynamic, reorder, dict(options or {}))
    model._compiled_call_impl = FullGraph(model, root, chosen)  # what model(...) runs
    return model


def uncompile(model: _Module) -> _Module:
    """Let ``model`` run eagerly again; no-op if it does. Collective: no.

    Example:
        fsdp2.compile(model)
        fsdp2.uncompile(model)
        model(x)  # eager
    """
    mode = _mode_of(model)
    if mode is not None:
        mode.leave()
    return model


def graph_summaries(model: nn.Module) -> list[GraphSummary]:
    """A summary of the graphs that ``model`` has captured so far in full-graph mode: collectives, overlap, peak of memory."""
    mode = _mode_of(model)
    return [] if mode is None else list(mode.summaries)


def _mode_of(model: nn.Module) -> FullGraph | None:
    mode = getattr(model, "_compiled_call_impl", None)
    return mode if isinstance(mode, FullGraph) else None


def _refuse_modes_below(model: nn.Module) -> None:
    below = [f"{name} ({type(module).__name__})" for name, module in model.named_modules() if _mode_of(module) is not None]
    if below:
        raise OrderError(
            f"{len(below)} parts of this {type(model).__name__} are in full-graph mode already",
            items=below,
            expected="full-graph mode on the root alone",
            fix="call fsdp2.uncompile on each of them before",
        )


def _root_of(model: Any, caller: str) -> ModuleState:
    unit = unit_of(model)
    if unit is None:
        raise ModuleError(
            f"fsdp2.{caller} got {type(model).__name__}, to which fully_shard was not applied",
            expected="the root module that fully_shard was applied to last",
            fix="call fully_shard(model) first; a model that is not sharded is compiled by torch.compile",
        )
    if unit.schedule is not None and unit.schedule.settled and unit.schedule.tree.root is not unit:
        raise OrderError(
            f"fsdp2.{caller} got {unit.fqn!r}, which is a part of a larger model",
            expected="the root, the module whose forward runs first",
            fix="pass the root: its graph contains the other units",
        )
    return unit


def _check_options(backend: Any, bucket_bytes: Any, options: Any) -> None:
    if backend not in BACKENDS:
        raise ArgumentError(
            f"fsdp2.compile got backend={backend!r}", expected=f"one of {BACKENDS}", fix='for instance backend="inductor"'
        )
    require("fsdp2.compile", NATURAL, bucket_bytes=bucket_bytes)
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(got("fsdp2.compile", "options", options), expected="a dict of inductor's settings", fix="leave options out")
    if options and backend != "inductor":
        raise ArgumentError(
            f"fsdp2.compile got options for backend={backend!r}",
            expected="options with inductor only",
            fix="leave options out",
        )
