"""From a module to a unit: which parameters it takes, how they are placed and grouped. Runs once, at ``fully_shard``.

Everything that can be refused is refused before the first change.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import ArgumentError, DeviceError, FSDPError, MeshError, ModuleError, OrderError, ParameterError, got
from ...mapped_file import check_disk_policy
from ...policy import DiskOffloadPolicy
from ...semantics import Semantics
from ...spmd_annotations import exempt_from_typechecking
from ...torch_names import torch_dtensors, torch_modules, torch_tensors
from ..comm.agreement import agree_on_meshes
from ..group.options import GroupOptions
from ..group.own_memory import cut_out, needs_own_memory, refuse_unextendable
from ..group.param import Owner, ShardedParam, new_sharded_param, sharded_from, shards
from ..group.param_group import ParamGroup
from ..iteration.module_state import ModuleState, group_with
from ..iteration.ties import tie_differences
from ..iteration.unit import UnitOptions
from ..modules.hooks import UnitHooks
from ..plan.mesh import DataParallelMesh, device_of, post_forward_mesh, read_mesh_info
from ..plan.placement import ShardSpec, is_lazy, refuse_placement, refuse_unplaceable, shard_spec

private_options: dict[str, Any] = {}
"""Fields of GroupOptions that tests and benchmarks force: gather, all_gather, reduce_scatter, all_reduce."""


def _disk_options(offload_policy: Any, mesh: DataParallelMesh) -> dict[str, Any]:
    """Fields of GroupOptions. Collective: for a DiskOffloadPolicy, over ``mesh``. Raises: ArgumentError on all ranks"""
    if not isinstance(offload_policy, DiskOffloadPolicy):
        return {}
    problem: FSDPError | None = None
    try:
        check_disk_policy(offload_policy)
    except FSDPError as error:
        problem = error
    agree_on_meshes([mesh.mesh], problem)
    return {"folder": os.fspath(offload_policy.path), "read_ahead": offload_policy.read_ahead}


def build_unit(
    modules: Sequence[nn.Module],
    mesh: DataParallelMesh,
    *,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: set[nn.Parameter],
    semantics: Semantics,
    state_class: type[ModuleState],
) -> ModuleState:
    """Shard and hook ``modules``. Collective: only for an int ``reshard_after_forward`` or a DiskOffloadPolicy.

    mesh:        for parameters for which ``shard_placement_fn`` names no other
    state_class: the class of the unit, which becomes the state of ``modules``
    """
    exempt_from_typechecking([build_unit])
    device = device_of(mesh)
    after = _checked_reshard_after_forward(reshard_after_forward, mesh)
    read = read_modules(modules, mesh, shard_placement_fn, ignored_params)
    options = GroupOptions(
        param_dtype=mp_policy.param_dtype,
        reduce_dtype=mp_policy.reduce_dtype,
        offload=hasattr(offload_policy, "pin_memory") or isinstance(offload_policy, DiskOffloadPolicy),
        pin_memory=getattr(offload_policy, "pin_memory", isinstance(offload_policy, DiskOffloadPolicy))
        and device.type != "cpu",
        **_disk_options(offload_policy, mesh),
        mp_policy=mp_policy,
        semantics=semantics,
        **private_options,
    )
    groups, borrowed = _new_groups(read, device, options, reshard_after_forward)
    if any(group.smaller_mesh is not None for group in groups):
        after = reshard_after_forward
    unit = state_class(
        modules,
        groups,
        borrowed,
        device,
        mp_policy,
        UnitOptions(reshard_after_forward=True if after is None else after, reshard_is_default=after is None),
    )
    unit.ignored = _places(read.managed, read.ignored)
    unit.hooks = UnitHooks(unit)
    unit.hooks.install()
    for module in modules:
        torch_modules.register_module_state(module, unit)
    return unit


def extend_unit(unit: ModuleState, read: ModulesRead, example: ParamGroup) -> list[nn.Parameter]:
    """Shard what was registered below ``unit`` since ``fully_shard``, in new groups. Collective: as ``build_unit``

    example: a group, of ``unit`` if it has one, whose options the new ones get; precision is the unit's
    Returns: the parameters, sharded
    """
    policy = unit.mp_policy
    options = replace(
        example.options, mp_policy=policy, param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype
    )
    groups, borrowed = _new_groups(read, unit.device, options, unit.options.reshard_after_forward)
    for group in groups:
        same = next((each for each in unit.groups if each.mesh is group.mesh), None)
        if same is not None:
            group.gradients.options = replace(same.gradients.options, grad_dtype=None)
            group.all_gather_comm = same.all_gather_comm
    unit.extend(groups, borrowed)
    unit.ignored += _places(read.managed, read.ignored)
    for group in (*groups, *borrowed):
        unit.hooks.watch_state_dicts(group)
    return [param.sharded for group in groups for param in group.params]


def _new_groups(
    read: ModulesRead, device: torch.device, options: GroupOptions, reshard_after_forward: bool | int | None
) -> tuple[list[ParamGroup], list[ParamGroup]]:
    """The groups of what was read, and those of earlier units that it is tied to; modules show sharded parameters."""
    found, mp_policy = read.found, options.mp_policy
    specs = {param: shard_spec(each.name, param, each.mesh, each.placement) for param, each in found.items()}
    afters = {
        id(each.mesh): _checked_reshard_after_forward(reshard_after_forward, each.mesh)
        for each in found.values()
        if each.mesh.shard_size > 1
    }
    dtypes = {param: _param_dtype(each.name, param, mp_policy) for param, each in found.items()}
    borrowed = _borrow(read.tied, read.place, options)
    with torch.no_grad():  # before any change: tensor subclasses may refuse to be cut
        cut = {
            param: cut_out(each.name, torch_dtensors.local_of(param), specs[param], each.mesh.shard_rank)
            for param, each in found.items()
            if needs_own_memory(param)
        }
    groups = []
    parts: dict[Any, list[nn.Parameter]] = {}
    for param, each in found.items():
        key = param.dtype, dtypes[param], needs_own_memory(param), *each.mesh.groups
        parts.setdefault(key, []).append(param)
    for params in parts.values():
        mesh = found[params[0]].mesh
        sharded = [_shard(param, found[param], specs[param], cut.get(param), device, options) for param in params]
        group = ParamGroup(sharded, mesh, device, replace(options, param_dtype=dtypes[params[0]]))
        after = afters.get(id(mesh))
        if isinstance(after, int) and not isinstance(after, bool):
            group.smaller_mesh = post_forward_mesh(mesh, after)
        groups.append(group)
    if options.folder is not None:
        agree_on_meshes([each.mesh.mesh for each in found.values()], None)  # all raise if the disk of one had no room
    for buffer in read.buffers.values():
        if not buffer.is_meta:
            torch_tensors.set_data(buffer, buffer.to(device))
    for tied, _, owners in read.tied:
        for owner in owners:
            group_with(tied).registry.add_owner(tied, owner)
    for module in read.managed:  # the compiler looks for these
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = True  # type: ignore[assignment]
    return groups, borrowed


def _shard(
    param: nn.Parameter, found: Found, spec: ShardSpec, cut: Tensor | None, device: torch.device, options: GroupOptions
) -> ShardedParam:
    """cut: this rank's piece, if the parameter has memory of its own"""
    grad_dtype = torch_tensors.grad_dtype_of(param) if options.semantics != "2.13" else None
    kept_on = torch.device("cpu") if options.offload else device
    sharded = new_sharded_param(found.name, found.owners, param, spec, found.mesh.shard_rank, kept_on, cut)
    if grad_dtype is not None:
        torch_tensors.set_grad_dtype(sharded.sharded, grad_dtype)
    _refuse_gradients(param, sharded)
    return sharded


def _refuse_gradients(original: nn.Parameter, param: ShardedParam) -> None:
    """Let backward raise at ``original``: ``param`` was cut from it, a module still has it, both would drift apart."""
    if original.is_inference() or not (original.is_floating_point() or original.is_complex()):
        return  # it never gets a gradient
    reference = weakref.ref(param)

    def refuse(_: Tensor) -> None:
        cut = reference()
        name = "a parameter" if cut is None else cut.fqn
        raise OrderError(
            f"{name} was sharded while a module outside of any fully_shard call is tied to it, "
            "and has a gradient of its own now",
            expected="every module that shares a sharded parameter below a fully_shard call of its own or of a parent",
            fix="call fully_shard on the root as well, after its children, before the first forward",
        )

    trains = original.requires_grad
    original.requires_grad_(True)  # torch allows the hook on such a parameter only; the user may unfreeze it later
    original.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    original.requires_grad_(trains)


@dataclass(frozen=True)
class Found:
    """A parameter to shard: its first name, where it is registered, the mesh over which it is cut, and how."""

    name: str
    owners: list[Owner]
    mesh: DataParallelMesh
    placement: Any


@dataclass(frozen=True)
class ModulesRead:
    """What a unit of some modules would consist of.

    managed:  the modules in their trees that belong to it
    found:    every parameter to shard, in the order of ``named_parameters()``
    tied:     parameters that an earlier unit sharded, each with its name and owners here
    buffers:  every buffer to move, by name
    place:    tells mesh and placement of a parameter
    ignored:  parameters to leave alone
    """

    managed: list[nn.Module]
    found: dict[nn.Parameter, Found]
    tied: _Tied
    buffers: dict[str, Tensor]
    place: _Place
    ignored: set[nn.Parameter]


def read_modules(
    modules: Sequence[nn.Module],
    mesh: DataParallelMesh,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    ignored_params: set[nn.Parameter],
    unit: ModuleState | None = None,
) -> ModulesRead:
    """Read ``modules`` without a change. Raises an FSDPError for what can't be sharded as asked. Collective: no.

    unit: theirs, if they have one, whose parameters are left out
    """
    _check_placement_fn(shard_placement_fn)
    managed = managed_modules(modules) if unit is None else modules_below(modules)
    sharded = set() if unit is None else _parameters_of(unit, managed)
    _refuse_sharded(ignored_params.difference(sharded))
    owned = _owners(modules, managed, ignored_params | sharded)
    _refuse_scripted(owned)
    _refuse_taken(owned)
    tied = [(other, *owned.pop(each)) for each in list(owned) if (other := sharded_from(each)) is not None]
    buffers = _buffers(modules, managed)
    place = _placer(shard_placement_fn, mesh)
    found = {param: Found(name, owners, *place(name, param)) for param, (name, owners) in owned.items()}
    refuse_unplaceable((each.name, param, each.mesh, each.placement) for param, each in found.items())
    refuse_unextendable((each.name, param) for param, each in found.items())
    _check_devices(found, buffers, device_of(mesh))
    return ModulesRead(managed, found, tied, buffers, place, ignored_params)


def managed_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules_below``. Raises: OrderError if a parent of one was sharded before"""
    for module in modules:
        if vars(module).get("_is_fsdp_managed_module"):
            raise OrderError(
                f"fully_shard was applied to a parent of this {type(module).__name__} before",
                expected="children before their parents: a call takes all parameters that no earlier call took",
                fix="call fully_shard on this module first, then on its parent",
            )
    return modules_below(modules)


def modules_below(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules in the trees of ``modules`` that no other data-parallel API manages, each once."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found or (
            module not in modules and {"fully_shard", "replicate"} & set(torch_modules.applied_apis(module))
        ):
            return
        found[module] = None
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(found)


def _places(managed: Sequence[nn.Module], params: set[nn.Parameter]) -> list[Owner]:
    return [
        Owner(module, name)
        for module in managed
        for name, param in module._parameters.items()
        if param is not None and param in params
    ]


def _parameters_of(unit: ModuleState, managed: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Those in ``managed`` that ``unit`` has, or was told to ignore."""
    owners = [owner for group in unit.uses for param in group.params for owner in param.owners] + unit.ignored
    places = {(id(owner.module), owner.name) for owner in owners}
    return {
        param
        for module in managed
        for name, param in module._parameters.items()
        if param is not None and (id(module), name) in places
    }


_Place = Callable[[str, nn.Parameter], tuple[DataParallelMesh, Any]]


def _placer(shard_placement_fn: Callable[[nn.Parameter], Any] | None, own_mesh: DataParallelMesh) -> _Place:
    """A function that asks ``shard_placement_fn`` for a parameter's mesh and placement, which it does not check yet.

    own_mesh: where ``shard_placement_fn`` names no mesh
    """
    meshes: dict[int, tuple[Any, DataParallelMesh]] = {}  # by id; the object itself keeps its id from being reused

    def place(name: str, param: nn.Parameter) -> tuple[DataParallelMesh, Any]:
        """Raises: MeshError if the result names a mesh on which nothing can be sharded."""
        result: Any = None if shard_placement_fn is None or is_lazy(param) else shard_placement_fn(param)
        if not hasattr(result, "mesh_info"):
            return own_mesh, result
        if result.mesh_info is None:
            return own_mesh, result.placement
        key = id(result.mesh_info)
        if key not in meshes:
            mesh = read_mesh_info(result.mesh_info)
            if mesh.device_type != own_mesh.device_type:
                raise MeshError(
                    f"{name} {tuple(param.shape)}: shard_placement_fn returned a mesh of {mesh.device_type} ranks",
                    expected=f"the device type of the mesh that fully_shard got, {own_mesh.device_type}",
                    fix="build all meshes for one device type",
                )
            meshes[key] = (result.mesh_info, mesh)
        return meshes[key][1], result.placement

    return place


def _param_dtype(name: str, param: nn.Parameter, mp_policy: Any) -> torch.dtype | None:
    """``param_dtype``, or what ``param_dtype_override_fn`` returns. Raises: ArgumentError if that is a third dtype."""
    override = getattr(mp_policy, "param_dtype_override_fn", None)
    usual: torch.dtype | None = mp_policy.param_dtype
    given = None if override is None else override(param)
    if given is None or given is (usual or param.dtype):
        return usual
    if not isinstance(given, torch.dtype) or given not in (usual, param.dtype):
        raise ArgumentError(
            f"{name} {tuple(param.shape)} {param.dtype}: param_dtype_override_fn returned {given!r}",
            expected=f"None, param_dtype ({usual}), or the parameter's own dtype",
            fix="choose one of these",
        )
    return given


_Owned = dict[nn.Parameter, tuple[str, list[Owner]]]


def _owners(modules: Sequence[nn.Module], managed: Sequence[nn.Module], ignored: set[nn.Parameter]) -> _Owned:
    """Every parameter to shard with its first name and its owners, in the order of ``named_parameters()``."""
    owned: _Owned = {}
    for prefix, module in _with_prefixes(modules, managed):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored:
                _, owners = owned.setdefault(param, (prefix + name, []))
                if not any(owner.module is module and owner.name == name for owner in owners):
                    owners.append(Owner(module, name))
    return owned


def _buffers(modules: Sequence[nn.Module], managed: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Every buffer to move, each once, with its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in _with_prefixes(modules, managed):
        for name, buffer in module.named_buffers(recurse=False):
            found.setdefault(id(buffer), (prefix + name, buffer))
    return dict(found.values())


def _with_prefixes(modules: Sequence[nn.Module], managed: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each of ``managed``, with what its name adds before those of its parameters: "layers.3."."""
    inside = set(managed)
    for index, root in enumerate(modules):
        prefix = f"{index}." if len(modules) > 1 else ""
        for name, module in root.named_modules():
            if module in inside:
                yield f"{prefix}{name}." if name else prefix, module


def _refuse_scripted(owned: _Owned) -> None:
    """Raise for parameters inside of modules that take no hooks."""
    scripted = [
        f"{name} in a {type(owner.module).__name__}"
        for name, owners in owned.values()
        for owner in owners
        if isinstance(owner.module, torch.jit.ScriptModule)
    ]
    if scripted:
        raise ModuleError(
            f"{len(scripted)} parameters are inside of scripted modules, which take no hooks",
            items=scripted,
            expected="modules that run in Python",
            fix="use the modules that were scripted or traced, or pass these parameters in ignored_params",
        )


def _refuse_sharded(ignored: set[nn.Parameter]) -> None:
    """Raise if an earlier call has sharded a parameter of ``ignored``, which may also lie elsewhere in the model."""
    sharded = [
        f"{param.fqn} {tuple(param.sharded.shape)}" for each in ignored if (param := sharded_from(each)) is not None
    ]
    if sharded:
        raise ArgumentError(
            f"ignored_params has {len(sharded)} parameters that an earlier fully_shard call has sharded",
            items=sorted(sharded),
            expected="the same ignored_params for all calls on parts of a model",
            fix="pass them to the call that sharded them as well",
        )


_Tied = list[tuple[ShardedParam, str, list[Owner]]]


def _refuse_taken(owned: _Owned) -> None:
    """Raise if a module was put around, or tied to, what an earlier call sharded."""
    known = shards() if any(isinstance(param, DTensor) for param in owned) else {}
    taken = [
        f"{name} {tuple(param.shape)}"
        for param, (name, _) in owned.items()
        if id(param) in known or _is_shown_unsharded(param)
    ]
    if taken:
        raise OrderError(
            f"{len(taken)} parameters were sharded by an earlier fully_shard call on another module",
            items=taken,
            expected="modules whose parameters no earlier call took: a call takes all that are below its module",
            fix="wrap and tie modules before the first fully_shard call, which is on a child before its parent; "
            "of a wrapper that came later, pass the modules that are new",
        )


def _is_shown_unsharded(param: nn.Parameter) -> bool:
    """Whether a module shows ``param`` between unshard and reshard, so that it is no original, which may be tied."""
    other = sharded_from(param)
    if other is None:
        return False
    smaller = group_with(other).smaller
    return param is other.unsharded or any(param is each for each in ([] if smaller is None else smaller.shown))


def _borrow(tied: _Tied, place: _Place, options: GroupOptions) -> list[ParamGroup]:
    """The groups that ``tied`` belong to. Raises: ParameterError if one is placed or cast otherwise than asked here."""
    borrowed: dict[int, ParamGroup] = {}
    for sharded, name, _ in tied:
        group = group_with(sharded)
        wanted = replace(options, param_dtype=_param_dtype(name, sharded.sharded, options.mp_policy))
        mesh, placement = place(name, sharded.sharded)
        refuse_placement(name, sharded.sharded, placement)
        dim = 0 if placement is None else placement.dim % max(sharded.sharded.ndim, 1)
        differences = tie_differences(group, sharded, mesh, wanted, dim)
        if differences:
            raise ParameterError(
                f"{name} {tuple(sharded.sharded.shape)} is tied to {sharded.fqn}, "
                "which an earlier fully_shard call took with " + " and ".join(differences),
                expected="the same mesh, dtypes, offload policy and placement for all modules that share a parameter",
                fix="make the two calls agree, or pass the modules as one list, fully_shard([module_a, module_b])",
            )
        borrowed[id(group)] = group
    return list(borrowed.values())


def _check_placement_fn(shard_placement_fn: Any) -> None:
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise ArgumentError(
            got("fully_shard", "shard_placement_fn", shard_placement_fn),
            expected="a function from an nn.Parameter to a Shard or None",
            fix="for instance shard_placement_fn=lambda param: Shard(1)",
        )


def _checked_reshard_after_forward(value: Any, mesh: DataParallelMesh) -> bool | int | None:
    """None, True, False, or the number of ranks to reshard to, which is neither 1 nor all of them."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and 1 <= value <= mesh.shard_size and mesh.shard_size % value == 0:
        return value if 1 < value < mesh.shard_size else value != 1
    factors = [n for n in itertools.islice(itertools.count(1), mesh.shard_size) if mesh.shard_size % n == 0]
    raise ArgumentError(
        f"fully_shard got reshard_after_forward={value!r}",
        expected=f"a bool, None, or an int that is a factor of {mesh.shard_size}, "
        f"the size of the shard axis: {factors}",
        fix="for instance the number of ranks on a node",
    )


def _check_devices(found: dict[nn.Parameter, Found], buffers: dict[str, Tensor], device: torch.device) -> None:
    """Refuse tensors that ``fully_shard`` does not move: those on other devices than the CPU, meta and the mesh's."""
    tensors: list[tuple[str, Tensor, str]] = [(each.name, param, "") for param, each in found.items()]
    tensors += [(name, buffer, " (a buffer)") for name, buffer in buffers.items()]
    wrong = [
        f"{name} {tuple(tensor.shape)} on {tensor.device}{kind}"
        for name, tensor, kind in tensors
        if tensor.device.type not in ("cpu", "meta", device.type)
    ]
    if wrong:
        raise DeviceError(
            f"{len(wrong)} tensors are on a device that is not the mesh's",
            items=wrong,
            expected=f"{'' if device.type == 'cpu' else f'{device}, '}the CPU or the meta device, "
            "from which they are moved",
            fix="move the module first, or pass a mesh of that device's type",
        )
