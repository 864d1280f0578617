"""The errors of full-graph mode, also when a forward cannot be captured. This file changes nothing and communicates nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ..core.iteration.unit import Unit
from ..errors import CompileError, OrderError
from . import torch_names as compiler

# How torch begins the lines of what it says about code that it cannot trace.
_EXPLANATION, _CONTEXT = "Explanation:", "Developer debug context:"


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def not_captured(model: nn.Module, error: BaseException) -> CompileError:
    """The error to raise for ``error``, the compiler's: the place in the user's code, torch's explanation, and what to do."""
    place = compiler.place_of(error)
    text = next((str(each) for each in causes_of(error) if _EXPLANATION in str(each)), str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    what = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    items = [] if place is None else [f"at {place}"]
    items += [line.removeprefix(lead).strip() for lead in (_EXPLANATION, _CONTEXT) for line in lines if line.startswith(lead)]
    if "recompile limit" in lines[0]:
        fix = "pass what changes from call to call as a tensor, or allow more captures: torch._dynamo.config.recompile_limit"
    else:
        fix = "fix its cause" if place is None else "change that line"
    return CompileError(
        f"forward of {type(model).__name__} cannot be captured in one graph: {what}",
        items=[item[:300] for item in items if item],
        expected="a forward that torch.compile(fullgraph=True) can trace",
        fix=f"{fix}; or compile block by block: block.compile(). This model runs eagerly from now on",
    )


def refuse_what_graphs_lack(units: Sequence[Unit]) -> None:
    """Refuse everything about ``units`` that a captured graph cannot do.

    Collective: no.
    Raises:     CompileError naming units and parameters; OrderError if gradients wait to be reduced
    """
    found = []
    for unit in units:
        where = unit.name
        if unit.max_norm_weights:
            found.append(f"{where}: Embedding(max_norm=...) writes to its weight in forward")
        if unit.options.optional:
            found.append(f"{where}: it is optional (set_optional)")
        for group in unit.groups:
            gradients = group.gradients
            names = ", ".join(param.fqn for param in group.params[:3])
            if group.plan.has_own_memory:
                found.append(f"{where}: {names} have all-gather extensions")
            if any(param.spec.unsharded is not None for param in group.params):
                found.append(f"{where}: {names} are DTensors in addition to data parallelism (tensor, sequence or expert parallelism)")
            if group.options.offload:
                found.append(f"{where}: its parameters are offloaded to the host")
            if group.all_gather_comm is not None or gradients.options.comm is not None:
                found.append(f"{where}: it has a custom communicator")
            if gradients.options.all_reduce_hook is not None or gradients.options.all_reduce_instead is not None:
                found.append(f"{where}: it has an all-reduce hook")
            if gradients.options.grad_dtype not in (None, group.plan.dtype):
                found.append(f"{where}: its gradients are kept in {gradients.options.grad_dtype}, which is not the parameters' own")
            if gradients.has_unreduced:
                raise OrderError(
                    f"{where} holds gradients that were accumulated without sync and not reduced yet",
                    expected="a model between two optimizer steps",
                    fix="switch to full-graph mode after the backward that reduces, or drop them with model.zero_grad()",
                )
    if found:
        raise CompileError(
            f"{len(found)} things about this model cannot be part of a captured graph",
            items=found,
            expected="plain parameters on 1-D or (replicate, shard) meshes, with collectives of our own",
            fix="compile block by block instead: block.compile() on each module that fully_shard is applied to",
        )
