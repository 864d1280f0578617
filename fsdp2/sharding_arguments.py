"""Checks of the user's arguments, before anything is changed; errors name what cannot work.

Each check is of one kind of argument; its error names the expected value, the one it got, and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy  # our class descends from it

from .communicators import OwnAllGather, OwnReduceScatter
from .core.group.param_group import ParamGroup
from .core.iteration.module_state import ModuleState, unit_of
from .core.iteration.unit import PrefetchDepth, Unit
from .core.plan.mesh import DataParallelMesh, read_mesh
from .errors import ArgumentError, ArgumentTypeError, ModuleError, NotAModuleError, OrderError, got, got_object, message
from .policy import AllGather, ReduceScatter
from .torch_names import torch_modules
from .user_warnings import warn

_UNFIT: tuple[tuple[Callable[[nn.Module], bool], str, str, str], ...] = (
    (
        lambda module: isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward,
        "fully_shard does not support containers that do not implement forward: {}",
        "a module whose forward runs, because that is when its parameters are gathered",
        "call fully_shard on each of its items, or pass list(container) to make them one group",
    ),
    (
        lambda module: isinstance(module, torch.jit.ScriptModule),
        "fully_shard got a {}, which takes no hooks",
        "a module that runs in Python",
        "apply fully_shard to the module that was scripted or traced",
    ),
    (
        lambda module: "fully_shard" in torch_modules.applied_apis(module),
        "fully_shard was already applied to this {}",
        "each module at most once",
        "remove the second call",
    ),
    (
        lambda module: "replicate" in torch_modules.applied_apis(module),
        "replicate() was already applied to this {}",
        "one data-parallel API for a module",
        "use a 2-D mesh with fully_shard to replicate and shard",
    ),
)
"""Modules that cannot be sharded: which, the headline with {} for the class, what was expected, the fix."""


# Experts are sharded over an axis of experts, and parameters, which context parallelism copies, over its axis.
_MODEL_AXES = {1: ("(shard,)", ("pp", "tp")), 2: ("(replicate, shard)", ("cp", "ep", "pp", "tp"))}


def checked_data_mesh(mesh: DeviceMesh | None, dims: Any = None) -> DataParallelMesh:
    """As ``read_mesh``; warns of axes that are called like model axes. A parameter's own mesh may well have one of experts."""
    read = read_mesh(mesh, dims)
    names = read.mesh.mesh_dim_names
    if mesh is not None and dims is None and names is not None:
        meaning, strange = _MODEL_AXES[mesh.ndim]
        found = [name for name in names if name.lower() in strange]
        if found:
            warn(
                message(
                    f"fully_shard takes the mesh {names} as {meaning}, although an axis is called {found[0]}",
                    expected="the data-parallel axes alone",
                    fix="pass the data-parallel slice, for instance mesh['dp'], or rename the axes if both carry data parallelism",
                ),
                ranks=set(mesh.mesh.flatten().tolist()),
                once=f"axes {names}",
            )
    return read


def checked_modules(module: Any) -> list[nn.Module]:
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, (list, tuple)):
        raise NotAModuleError(
            got_object("fully_shard", module),
            expected="an nn.Module or a list of them (in an order that is the same on all ranks)",
            fix="pass the module itself, or list(modules)",
        )
    if not modules:
        raise ModuleError("fully_shard got an empty list", expected="at least one module", fix="pass the modules of one group")
    for index, each in enumerate(modules):
        if not isinstance(each, nn.Module):
            raise NotAModuleError(got("fully_shard", f"module[{index}]", each), expected="a list of nn.Module", fix="pass modules only")
        if sum(each is other for other in modules) > 1:
            raise ModuleError(
                f"fully_shard got a list that has the same {type(each).__name__} more than once",
                expected="each module at most once",
                fix="leave the others out: a shared module belongs to one group",
            )
        for is_unfit, headline, expected, fix in _UNFIT:
            if is_unfit(each):
                raise ModuleError(headline.format(type(each).__name__), expected=expected, fix=fix)
    return [each for each in modules if not any(each is not other and each in set(other.modules()) for other in modules)]


def check_policies(mp_policy: Any, offload_policy: Any, ignored_params: Any) -> None:
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if isinstance(mp_policy, type) or any(not hasattr(mp_policy, field) for field in fields):
        raise ArgumentTypeError(
            f"fully_shard got mp_policy={mp_policy!r}",
            expected="a MixedPrecisionPolicy (of fsdp2 or torch.distributed.fsdp)",
            fix="pass MixedPrecisionPolicy(...)",
        )
    if not (offload_policy is None or isinstance(offload_policy, TorchOffloadPolicy)):
        raise ArgumentError(
            got("fully_shard", "offload_policy", offload_policy),
            expected="an OffloadPolicy (of fsdp2 or torch.distributed.fsdp), or None",
            fix="pass CPUOffloadPolicy() to offload, or leave it out",
        )
    checked_bool("MixedPrecisionPolicy", "cast_forward_inputs", mp_policy.cast_forward_inputs)
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise (ArgumentError if isinstance(dtype, torch.dtype) else ArgumentTypeError)(
                f"MixedPrecisionPolicy got {field}={dtype!r}",
                expected="a floating-point torch.dtype or None",
                fix=f"for instance {field}=torch.bfloat16",
            )
    if ignored_params is not None and not isinstance(ignored_params, (set, frozenset)):
        raise ArgumentError(
            f"fully_shard got ignored_params of type {type(ignored_params).__name__}",
            expected="a set of nn.Parameter",
            fix="pass set(params): parameters compare by identity in a set, by value in a list",
        )
    for param in ignored_params or ():
        if not isinstance(param, nn.Parameter):
            raise ArgumentError(
                f"fully_shard got ignored_params with a {type(param).__name__}",
                expected="a set of nn.Parameter",
                fix="pass the parameters themselves, not their names",
            )


def check_bool(setter: str, argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(got(setter, argument, value), expected=f"{argument} should be a bool", fix="pass True or False")


def checked_bool(setter: str, argument: str, value: Any) -> bool:
    """``value``; a bool for 0 and 1, which torch's setters accept, too."""
    if not isinstance(value, int) or value not in (0, 1):
        check_bool(setter, argument, value)
    return bool(value)


def check_divide_factor(factor: Any) -> None:
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0):
        raise ArgumentError(
            got("set_gradient_divide_factor", "factor", factor),
            expected="a positive number, or None",
            fix="1.0 sums gradients; None averages them over all data-parallel ranks, as by default",
        )


def check_max_input_buffers(max_input_buffers: Any) -> None:
    if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int) or max_input_buffers < 1:
        raise ArgumentError(
            got("set_reduce_scatter_max_input_buffers", "max_input_buffers", max_input_buffers),
            expected="max_input_buffers must be a positive int",
            fix="pass 1 or more",
        )


def checked_depth(units: Any, max_nbytes: Any) -> PrefetchDepth:
    for name, given, least in (("number of modules", units, 0), ("max_nbytes", max_nbytes, 1)):
        if given is None and name == "max_nbytes":
            continue
        if isinstance(given, bool) or not isinstance(given, int) or given < least:
            raise ArgumentError(
                got("set_prefetch_depth", name, given),
                expected=f"{name} must be an int from {least} on",
                fix="pass how many modules to gather ahead, and how many bytes at most, or None",
            )
    return PrefetchDepth(units, max_nbytes)


def checked_nbytes(caller: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(got(caller, name, value), expected="bytes: an int, 0 or more", fix="pass for instance 4 << 30; 0 for none")
    return value


def check_method(module: nn.Module, method_name: Any) -> None:
    if not isinstance(method_name, str) or not hasattr(module, method_name):
        raise ArgumentError(
            f"{type(module).__name__} does not have a method {method_name!r}",
            expected="the name of a method of the module",
            fix="check its spelling",
        )


def groups_of_one_mesh(unit: ModuleState, caller: str) -> list[ParamGroup]:
    """The groups of ``unit``. Raises: ArgumentError if they do not all communicate over one process group."""
    groups = unit.groups
    if len({id(group.mesh.shard_group) for group in groups}) > 1:
        raise ArgumentError(
            f"{caller} is not supported with multiple param groups over different process groups",
            expected="a module whose parameters all have one mesh",
            fix="call it on modules that hold the parameters of one mesh each",
        )
    return groups


def refuse_custom(gather: AllGather | None, scatter: ReduceScatter | None, caller: str) -> None:
    for comm in (gather, scatter):
        if comm is not None and not isinstance(comm, (OwnAllGather, OwnReduceScatter)):
            raise OrderError(
                f"cannot call {caller}() after a custom communicator was set: {type(comm).__name__}",
                expected="our own communicators, whose buffers we allocate",
                fix="let the custom communicator's allocate() use that memory",
            )


def checked_units(modules: Sequence[Any], caller: str) -> list[ModuleState]:
    if not isinstance(modules, (list, tuple)):
        raise ModuleError(
            got_object(caller, modules),
            expected="a list of modules that fully_shard was applied to (FSDPModule)",
            fix="pass [module]",
        )
    for each in modules:
        if unit_of(each) is None:
            raise ModuleError(
                f"{caller} got a {type(each).__name__}",
                expected="modules that fully_shard was applied to (FSDPModule)",
                fix="apply fully_shard to it first",
            )
    return [unit for each in modules if (unit := unit_of(each)) is not None]


def refuse_symmetric_inputs(units: Sequence[Unit]) -> None:
    """Refuse several inputs in flight: each would take a segment of symmetric memory, which is scarce."""
    several = [
        f"{unit.fqn or 'the root'}: {unit.options.max_reductions} input buffers"
        for unit in units
        if unit.options.max_reductions > 1
        and any(
            isinstance(comm := group.gradients.options.comm, OwnReduceScatter) and comm.symmetric is not None for group in unit.groups
        )
    ]
    if several:
        raise ArgumentError(
            "set_reduce_scatter_max_input_buffers was called with more than 1 where reduce-scatters use symmetric memory",
            items=several,
            expected="one input buffer with set_symm_mem_for_comm and set_force_sum_reduction_for_comms(True)",
            fix="leave max_input_buffers at 1, or reduce-scatter without symmetric memory",
        )


def warn_of_ignored_prefetch(unit: Unit, root: Unit) -> None:
    """Warn if its backward was told to prefetch, and must not: ranks do not compare whether backward comes to it."""
    if unit.options.prefetch_backward and not unit.uses and unit is not root:
        warn(
            f"set_modules_to_backward_prefetch has no effect on {unit.fqn}, which has no parameters of its own: "
            "its backward may run on some ranks only. Call it on a module that has parameters, or on the root"
        )
