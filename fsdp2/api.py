"""``fully_shard`` and the other functions of torch's FSDP2, argument by argument (methods: ``fsdp_module.py``).

This file lets ``sharding_arguments.py`` check its arguments and hands them down; ``core/`` does the work.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .clients.state import ClientState
from .core.iteration.finalization import CommContext
from .core.iteration.module_state import named_units, schedule_of, sharded_unit, unit_of
from .core.setup.build import build_unit, extend_unit, read_modules
from .errors import MeshError, ModuleError, OrderError, parked_error
from .fsdp_module import FSDPModule
from .hangs.asked import watch_if_asked
from .hints.wide_gradients import tell_of_wide_gradients
from .lost_ranks import note_process
from .policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from .semantics import chosen_semantics
from .sharded_class import sharded_class, swap_class
from .sharding_arguments import (
    check_method,
    check_policies,
    checked_data_mesh,
    checked_modules,
    checked_units,
)

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (a frozen value, and upstream's signature)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` over data-parallel ranks, in place.

    The parameters that no earlier call on a submodule has sharded become one group, gathered and reduced together: call it bottom-up,
    on each block and last on the root. Between steps ``module.parameters()`` are DTensors, in forward and backward plain tensors.

    module:                 a module, or a list of modules that become one group
    mesh:                   1-D: shard over it; 2-D with named axes: replicate over axis 0, shard over axis 1; None: 1-D over all
                            ranks. Parameters and buffers move to its device type.
    reshard_after_forward:  True: free the unsharded parameters after forward and gather them again in backward; False: keep
                            them; an int that divides the shard axis: keep them sharded over that many ranks; None: False
                            for the root if a backward may follow its forward, else True.
    shard_placement_fn:     the dim to shard for a parameter, even or not; None is Shard(0). A ShardPlacementResult also names
                            another mesh; parameters of one mesh and dtype become one group.
    mp_policy:              dtypes of parameters, reduction, inputs and outputs
    offload_policy:         where sharded parameters and gradients live: CPUOffloadPolicy, DiskOffloadPolicy; None: on the device
    ignored_params:         parameters to leave alone: not moved, not sharded, their gradients not reduced
    dp_mesh_dims:           ``mesh`` is a full SPMD mesh, on which all parameters are DTensors, and these of its axes carry data
                            parallelism. A gradient that is Partial over one of them is averaged; one that is Replicate counts
                            once, on however many ranks it is.
    Returns:                ``module``, now of class ``FSDP<Name>``, which is an FSDPModule and still its own class
    Collective:             no, except for ``mesh=None`` and an int ``reshard_after_forward``, which make process groups, and a
                            DiskOffloadPolicy, whose folder all ranks find fit or none
    Raises:                 an FSDPError that names parameter and rank, before anything is changed
    Source:                 ZeRO stage 3 (Rajbhandari et al. 2020); per-parameter sharding as in PyTorch FSDP2

    Example:
        for block in net:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters())
        net(x).sum().backward()
        optimizer.step()
    """
    modules = checked_modules(module)
    check_policies(mp_policy, offload_policy, ignored_params)
    for each in modules:
        sharded_class(each, FSDPModule)  # a class that refuses to be subclassed does so before anything is changed
    unit = build_unit(
        modules,
        checked_data_mesh(mesh, dp_mesh_dims),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params or set(),
        semantics=chosen_semantics(),
        state_class=ClientState,
    )
    tell_of_wide_gradients(unit)
    for each in unit.modules:
        swap_class(each, FSDPModule)
    note_process()
    watch_if_asked()
    return module


fully_shard.state = unit_of  # type: ignore[attr-defined]  # as torch's


def adopt(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> list[str]:
    """Shard parameters that were registered in a sharded model after ``fully_shard``, such as adapters of PEFT.

    The sharded module around each takes it, in a group of its own, with its policies. Call it between two iterations, and make
    the optimizer afterwards: parameters are new objects, as after ``fully_shard``. Shards that are there already stay as they are.

    mesh:               for the new parameters; None: that of the sharded module around. A mesh (ranks, 1) of replicate and shard
                        axis leaves them whole on each rank, and averages their gradients
    shard_placement_fn, ignored_params: as for ``fully_shard``
    Returns:            the names of the parameters, from ``module``; none if nothing was new
    Collective:         no, except for an int ``reshard_after_forward`` or a DiskOffloadPolicy; call it on all ranks
    Raises:             ModuleError if nothing in ``module`` is sharded; OrderError while a backward is to come; MeshError if a sharded
                        module had no parameters of its own, and those of the others lie on several meshes: pass ``mesh``

    Example:
        model[0].adapter = nn.Linear(16, 16)
        fsdp2.adopt(model)  # ["0.adapter.weight", "0.adapter.bias"]
    """
    given: Any = module
    units = named_units(given) if isinstance(given, nn.Module) else []
    example = next((group for _, unit in units for group in unit.groups), None)
    if example is None:
        raise ModuleError(
            f"adopt got {type(module).__name__}, without parameters of fsdp2.fully_shard",
            expected="a sharded module, or a module with some inside",
            fix="call fully_shard, which takes all parameters that are there",
        )
    check_policies(MixedPrecisionPolicy(), None, ignored_params)
    meshes = {group.mesh.groups for _, unit in units for group in unit.groups}
    parked = [param.fqn for _, unit in units for group in unit.groups if group.is_parked for param in group.params]
    if parked:
        raise parked_error(parked)
    if any(unit.schedule is not None and unit.schedule.is_open for _, unit in units):
        raise OrderError(
            f"adopt: a forward of {type(module).__name__} has a backward to come",
            expected="a model between its iterations",
            fix="run its backward first; or forward under torch.no_grad(); or call model.reset_iter_state()",
        )
    on, ignored = None if mesh is None else checked_data_mesh(mesh), ignored_params or set()
    late = []
    for name, unit in units:
        unit.reshard_for_all()
        of_unit = unit.groups[0] if unit.groups else example
        read = read_modules(unit.modules, on or of_unit.mesh, shard_placement_fn, ignored, unit)
        if read.found and not unit.groups and on is None and len(meshes) > 1:
            raise MeshError(
                f"adopt found {len(read.found)} new parameters in {name or type(module).__name__}, which had none of its own",
                items=[each.name for each in read.found.values()],
                expected="a mesh, since the model's parameters lie on several",
                fix="pass mesh=",
            )
        late.append((unit, read, of_unit))
    adopted = {id(param) for unit, read, of_unit in late for param in extend_unit(unit, read, of_unit)}
    return [name for name, param in module.named_parameters() if id(param) in adopted]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>`` gather and free parameters as ``forward`` does; a no-op if it is not an FSDPModule.

    Raises: ArgumentError if there is no such method.

    Example:
        class Encoder(nn.Linear):
            def encode(self, x):
                return self(x).relu()


        encoder = fsdp2.fully_shard(Encoder(16, 16))
        fsdp2.register_fsdp_forward_method(encoder, "encode")
        encoder.encode(x)
    """
    if not isinstance(module, FSDPModule):
        return
    check_method(module, method_name)
    method = getattr(module, method_name)
    is_bound = getattr(method, "__self__", None) is module
    function = method.__func__ if is_bound else lambda _, *args, **kwargs: method(*args, **kwargs)

    @functools.wraps(method)
    def with_hooks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # ``self`` is another module in a deepcopy
        hooks = sharded_unit(self).hooks
        try:
            args, kwargs = hooks.pre_forward(self, args, kwargs)
            output = function(self, *args, **kwargs)
        except BaseException:
            hooks.end_failed_forward()
            raise
        return hooks.post_forward(self, args, output)

    setattr(module, method_name, types.MethodType(with_hooks, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots share communication streams. In fsdp2 all roots of a device share them anyway.

    While the handle of one root's ``finalize_backward(async_op=True)`` is open, the others may not run forward or finalize, either.
    Raises: ModuleError if a module is not an FSDPModule.

    Example:
        fsdp2.share_comm_ctx([model, fsdp2.fully_shard(net)])
    """
    context = CommContext()
    for unit in checked_units(modules, "share_comm_ctx"):
        schedule_of(unit).share(context)
