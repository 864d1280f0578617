"""A program's calls of ``fully_shard``, ours or torch's."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fuzz.modules import Doubled, Part, State
from fuzz.program import Program, Unit, units, walk
from harness import cpu_mesh
from harness.training import forced


def shard(program: Program, model: Part, state: State, lib: Any) -> list[Any]:
    """Call ``fully_shard`` for each of the program's units, set what the program sets, and return the roots."""
    mesh = cpu_mesh(*program.mesh)
    for node, _ in walk(program.root):
        if node.extension:
            _wrap(state.parts[node.name])
    ignored = {p for node, _ in walk(program.root) if node.ignored for p in state.parts[node.name].parameters(recurse=False)}
    options = {"gather": program.gather} if program.gather and lib.__name__ == "fsdp2" else {}
    with forced(**options):
        for unit, members in units(program):
            modules = [state.parts[node.name] for node in members]
            lib.fully_shard(modules if len(modules) > 1 else modules[0], **_arguments(unit, mesh, ignored, lib))
    for node, _ in walk(program.root):
        if node.method:
            lib.register_fsdp_forward_method(state.parts[node.name], "other")
    roots = _roots(model, lib)
    if len(roots) > 1:
        lib.share_comm_ctx(roots)
    for root in roots:
        if program.unused:
            root.set_reduce_scatter_unused_params(True)
        if program.separate_group:
            root.set_separate_reduce_scatter_group(True)
        if program.max_buffers != 1:
            root.set_reduce_scatter_max_input_buffers(program.max_buffers)
    sharded = [state.parts[members[0].name] for _, members in units(program)]
    if program.force_sum:
        for module in sharded:
            module.set_force_sum_reduction_for_comms(True)
    for before, module in itertools.pairwise(sharded):
        if program.prefetch == "forward":
            before.set_modules_to_forward_prefetch([module])
        elif program.prefetch == "backward":
            module.set_modules_to_backward_prefetch([before])
    return roots


def _roots(module: nn.Module, lib: Any) -> list[Any]:
    """The outermost sharded modules."""
    if isinstance(module, lib.FSDPModule):
        return [module]
    return [root for child in module.children() for root in _roots(child, lib)]


def _arguments(unit: Unit, mesh: DeviceMesh, ignored: set[nn.Parameter], lib: Any) -> dict[str, Any]:
    policy = {name: getattr(torch, dtype) for name in ("param_dtype", "reduce_dtype", "output_dtype") if (dtype := getattr(unit, name))}
    arguments: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": unit.reshard}
    if policy or not unit.cast_inputs:
        arguments["mp_policy"] = lib.MixedPrecisionPolicy(**policy, cast_forward_inputs=unit.cast_inputs)
    if unit.offload:
        arguments["offload_policy"] = lib.CPUOffloadPolicy(pin_memory=False)
    if unit.placement:
        arguments["shard_placement_fn"] = _last if unit.placement == "last" else _largest
    if ignored:
        arguments["ignored_params"] = ignored
    return arguments


def _last(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim > 1 else None


def _largest(param: nn.Parameter) -> Shard | None:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim > 0 else None


def _wrap(part: Part) -> None:
    for name, param in list(part._parameters.items()):
        if param is not None and param.ndim > 1:
            part._parameters[name] = nn.Parameter(Doubled(param.detach().clone()), param.requires_grad)
