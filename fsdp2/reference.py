"""What ``fully_shard`` means, in its plainest form: an implementation that shards nothing, to compare the one that shards with.

Every rank keeps whole parameters, gradients and optimizer states; after backward the ranks average their gradients, one by one:

    precision       parameters and inputs are cast to ``param_dtype``, outputs to ``output_dtype``, gradients to ``reduce_dtype``
    averaging       the sum over the data-parallel ranks, divided by their number or by the factor that was set
    accumulation    gradients that are not synchronized add up, unseen; the next synchronized backward averages their sum
    unused          a parameter that only some ranks used counts as zero on the others; one that no rank used gets no gradient
    initial values  rank r contributes the r-th piece of each parameter, the piece that it would keep

Not here: parameters as DTensors over data-parallel ranks, hooks on gradients and communication, RNNs in bf16, failed backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .fsdp_module import FSDPModule
from .policy import DataParallelMeshDims, MixedPrecisionPolicy
from .semantics import chosen_semantics

compute_dtype: torch.dtype | None = None  # for all, without regard to policies: torch.float64 tells rounding from faults


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **how: Any,  # to communicate, and where to keep shards
) -> Any:
    """As ``fsdp2.fully_shard``, but parameters stay whole. Collective: yes, an all-reduce of each parameter, for its initial values"""
    called = list(module) if isinstance(module, (list, tuple)) else [module]
    nested = [each for root in called for each in root.modules() if isinstance(each, ReferenceModule)]
    below = {each for unit in nested for each in unit.modules()}
    unit = Unit([each for root in called for each in root.modules() if each not in below], mp_policy or MixedPrecisionPolicy())
    left_out = {param for each in nested for param in each.reference.params} | (ignored_params or set())
    for each, (name, param) in ((owner, item) for owner in unit.modules for item in owner._parameters.items()):
        if param is not None and param not in left_out and param not in unit.params:
            chosen = None if shard_placement_fn is None else shard_placement_fn(param)
            unit.places[each, name] = axes = Axes(getattr(chosen, "mesh_info", None) or mesh, dp_mesh_dims)
            axes.assemble(_local(param), getattr(getattr(chosen, "placement", chosen), "dim", 0))
    for each in called:
        each.__class__, each.reference = type(f"FSDP{type(each).__name__}", (ReferenceModule, type(each)), {}), unit
    called[0].register_forward_pre_hook(unit.before_forward, with_kwargs=True)
    called[-1].register_forward_hook(unit.after_forward, always_call=True)
    return module


class Axes:
    """The process groups over whose ranks a parameter is sharded, and those whose ranks hold replicas of its pieces."""

    def __init__(self, mesh: Any, dims: DataParallelMeshDims | None) -> None:
        mesh = mesh if mesh is None or isinstance(mesh, DeviceMesh) else mesh.mesh  # torch's mesh infos have a mesh
        groups: list[Any] = [dist.group.WORLD] if mesh is None else mesh.get_all_groups()
        self.shard, self.replicate = groups[-1:], groups[:-1]
        if dims is not None:
            self.shard, self.replicate = ([*map(mesh.get_group, names)] for names in (dims.shard_names, dims.replicate_names))
        self.size = math.prod(dist.get_world_size(group) for group in self.shard + self.replicate)

    def __deepcopy__(self, memo: object) -> Axes:
        return self

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        for group in self.shard + self.replicate:
            dist.all_reduce(tensor, op, group=group)
        return tensor

    def assemble(self, whole: Tensor, dim: int) -> None:
        """Give the ranks of the shard axis one value, whose r-th piece along ``dim`` is that of rank r."""
        self.dim, rank, size = dim, 0, 1
        for group in self.shard:
            rank, size = rank * dist.get_world_size(group) + dist.get_rank(group), size * dist.get_world_size(group)
        for piece in (each for number, each in enumerate(whole.chunk(size, self.dim)) if number != rank):
            piece.zero_()
        for group in [] if whole.is_meta else self.shard:
            dist.all_reduce(whole, group=group)


class Unit:
    """The modules that one call of ``fully_shard`` covers, nested units excluded, and the parameters whose gradients it averages."""

    def __init__(self, modules: list[nn.Module], policy: MixedPrecisionPolicy) -> None:
        self.modules, self.policy, self.places = modules, policy, dict[tuple[nn.Module, str], Axes]()
        self.waiting: dict[nn.Parameter, Tensor] = {}  # sums of gradients that no backward has averaged yet
        self.is_synchronized, self.is_replicated, self.contributes, self.fills_unused, self.divide_factor = True, True, True, False, 0.0
        self.root: Unit | None = None  # the unit that was called first, for which one backward runs
        self.together: dict[nn.Parameter, Unit] = {}  # of a root: all parameters whose gradients are averaged after its backward
        self.earlier: dict[nn.Parameter, Tensor | None] = {}  # of a root in backward: gradients that earlier ones have averaged

    @property
    def params(self) -> dict[nn.Parameter, Axes]:  # as they are now: ``to_empty`` and loading put others in their places
        held: Any = [(each._parameters[name], axes) for (each, name), axes in self.places.items()]
        return {getattr(param, "stands_for", param): axes for param, axes in held}

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        own = (self.policy.param_dtype_override_fn or (lambda param: None))(param)
        return compute_dtype or own or self.policy.param_dtype or param.dtype

    def reduce_dtype(self, param: nn.Parameter) -> torch.dtype:
        return compute_dtype or self.policy.reduce_dtype or (self.dtype_of(param) if chosen_semantics() == "2.13" else param.dtype)

    def before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.root is None or self.root is self:
            units = dict.fromkeys(each.reference for each in module.modules() if isinstance(each, ReferenceModule))
            self.together = {param: unit for unit in units for param in unit.params}
            module._set("root", self)
        self.cast()
        return _cast((args, kwargs), compute_dtype or (self.policy.param_dtype if self.policy.cast_forward_inputs else None))

    @torch.enable_grad()
    def cast(self, *, back: bool = False) -> None:
        for owner, (name, param) in ((module, item) for module in self.modules for item in module._parameters.items()):
            if back:
                owner._parameters[name] = getattr(param, "stands_for", param)
            elif isinstance(param, nn.Parameter) and param.is_floating_point() and self.dtype_of(param) != param.dtype:
                cast: Any = param.to(self.dtype_of(param))  # its gradient goes to ``param``
                owner._parameters[name], cast.stands_for = cast, param

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.cast(back=True)
        output = _cast(output, None if compute_dtype else self.policy.output_dtype)
        for tensor in (each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad):
            tensor.register_hook((self.root or self).backward_has_begun)  # type: ignore[no-untyped-call]
        return output

    def backward_has_begun(self, gradient: Tensor) -> None:
        if not self.earlier:
            for param, unit in self.together.items():
                self.earlier[param], param.grad = param.grad, None
                unit.cast()  # for what activation checkpointing computes again
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_has_ended)

    @torch.no_grad()
    def backward_has_ended(self) -> None:
        earlier, self.earlier = self.earlier, {}
        for param, unit in self.together.items():
            unit.cast(back=True)
            if param.grad is not None and unit.contributes:  # else it is of a stand-in for a batch that this rank lacks
                new: Any = param.grad  # of tensor parallelism it may be partial sums
                new = _local(new.redistribute(placements=param.placements) if isinstance(param, DTensor) else new)
                unit.waiting[param] = unit.waiting.get(param, 0) + new.to(unit.reduce_dtype(param))
            reduces = param.requires_grad and unit.is_synchronized and (unit.is_replicated or not unit.params[param].replicate)
            new = unit.averaged(param) if reduces else None
            param.grad = earlier[param] if new is None else new if earlier[param] is None else earlier[param] + new

    def averaged(self, param: nn.Parameter) -> Tensor | None:
        """The mean over all ranks of what waits for ``param`` (a DTensor of tensor parallelism: of this rank's part of it)."""
        axes, gradient = self.params[param], self.waiting.pop(param, None)
        flag = torch.full((), float(gradient is not None), device=param.device)
        if not axes.all_reduce(flag, dist.ReduceOp.MAX) and not self.fills_unused:
            return None
        mine = torch.zeros_like(_local(param), dtype=self.reduce_dtype(param)) if gradient is None else gradient
        mean = (axes.all_reduce(mine) / (self.divide_factor or axes.size)).to(param.dtype)
        return DTensor.from_local(mean, param.device_mesh, param.placements) if isinstance(param, DTensor) else mean


class ReferenceModule(nn.Module):
    """The methods of ``FSDPModule`` that say what to compute. The others say how and when to communicate: they do nothing here."""

    def _set(self, attribute: str, *value: Any, recurse: bool = True, **named: Any) -> None:
        for each in (each for each in self.modules() if isinstance(each, ReferenceModule) and (recurse or each is self)):
            setattr(each.reference, attribute, *value, *named.values())

    reference: Unit
    set_requires_gradient_sync, set_requires_all_reduce = partialmethod(_set, "is_synchronized"), partialmethod(_set, "is_replicated")
    set_reduce_scatter_unused_params, wait = partialmethod(_set, "fills_unused"), lambda self, *_, **__: self  # as a handle
    set_gradient_divide_factor = set_reduce_scatter_divide_factor = partialmethod(_set, "divide_factor", recurse=False)

    def __getattr__(self, name: str) -> Any:
        return self.wait if name in vars(FSDPModule) and name[0] != "_" else super().__getattr__(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.reset_iter_state()
        super().zero_grad(set_to_none)

    def reset_iter_state(self) -> None:
        for unit in (each.reference for each in self.modules() if isinstance(each, ReferenceModule)):
            unit.waiting, unit.earlier = {}, {}


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if dtype and each.is_floating_point() else each, tree)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
