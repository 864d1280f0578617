"""The placement of one parameter: its cut over the shard axis, and its DTensor specs, sharded and unsharded.

A parameter is cut in its *physical* shape, with its dims in memory order, so that channels-last and transposed
parameters shard like any other; ``order`` leads from logical to physical dims.

Worked example: a (64, 3, 7, 7) channels-last weight over 8 ranks, Shard(0):

    physical shape (64, 7, 7, 3), order (0, 2, 3, 1); every rank keeps 8 of 64 rows; DTensor placements (Shard(0),)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...errors import ParameterError
from ...spmd_annotations import Annotations, has_types, read_annotations, was_annotated
from ...torch_names import torch_dtensors
from ...torch_names.torch_dtensors import DTensorSpec, TensorMeta
from .layout import Cut, contiguous_strides
from .mesh import DataParallelMesh, SpmdAxes
from .model_axes import beside_model_axes, within_spmd_mesh, without_axes


@dataclass(frozen=True)
class ShardSpec:
    """Placement of one parameter.

    cut:          how the physical tensor is cut over the shard axis; for a DTensor parameter, its local tensor
    order:        physical dims as indices of logical ones; None if they are the same
    sharded:      spec of the parameter that the user sees between steps
    unsharded:    spec in forward and backward, if the parameter is a DTensor on model axes (tensor parallelism, ...)
    data_axes:    data-parallel axes of the mesh of ``unsharded``; empty unless it is a full SPMD mesh
    annotations:  of a parameter that forward sees as a plain tensor, the local tensor of ``unsharded``
    """

    cut: Cut
    order: tuple[int, ...] | None
    sharded: DTensorSpec
    unsharded: DTensorSpec | None = None
    data_axes: tuple[int, ...] = ()
    annotations: Annotations | None = None

    @property
    def dim(self) -> int | None:
        """The logical dim that is cut; None if every rank keeps all of the parameter."""
        return self.cut.dim if self.cut.dim is None or self.order is None else self.order[self.cut.dim]

    def over(self, name: str, mesh: DataParallelMesh, dtype: torch.dtype) -> ShardSpec:
        """The same parameter in ``dtype`` cut on the same dim over another mesh."""
        cut = replace(self.cut, num_shards=mesh.shard_size)
        on_shard_axis = Replicate() if self.dim is None else Shard(self.dim)
        if self.unsharded is not None:
            unsharded = in_dtype(self.unsharded, dtype)
            model = without_axes(unsharded, self.data_axes)
            if model is not None:
                return ShardSpec(cut, self.order, beside_model_axes(name, mesh, model, on_shard_axis), unsharded)
        meta = in_dtype(self.sharded, dtype).tensor_meta
        return ShardSpec(cut, self.order, DTensorSpec(mesh.mesh, mesh.placements(on_shard_axis), tensor_meta=meta))

    def to_physical(self, tensor: Tensor) -> Tensor:
        """A logical tensor as a view in physical order (contiguous if it has the parameter's strides)."""
        return tensor if self.order is None else tensor.permute(self.order)

    def to_logical(self, tensor: Tensor) -> Tensor:
        if self.order is None:
            return tensor
        return tensor.permute([self.order.index(dim) for dim in range(len(self.order))])


def in_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """``spec`` for a tensor of another dtype."""
    assert spec.tensor_meta is not None
    return (
        spec if spec.tensor_meta.dtype is dtype else replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    )


def refuse_unplaceable(placements: Iterable[tuple[str, nn.Parameter, DataParallelMesh, Any]]) -> None:
    """Raise ParameterError for all parameters that cannot be placed as ``shard_placement_fn`` says; None: Shard(0)."""
    found = []
    for name, param, mesh, placement in placements:
        problem = _problem(param, mesh, placement)
        if problem is not None:
            shape = "" if is_lazy(param) else f" {tuple(param.shape)}"
            found.append(f"{name}{shape}: {problem}")
    _refuse(found)


def refuse_placement(name: str, param: Tensor, placement: Any) -> None:
    """Raise ParameterError if ``shard_placement_fn`` has returned what ``param``, which is sharded, cannot have."""
    problem = _problem_of_placement(param.ndim, placement)
    _refuse([] if problem is None else [f"{name} {tuple(param.shape)}: {problem}"])


def _refuse(found: list[str]) -> None:
    if found:
        raise ParameterError(
            f"{len(found)} parameters cannot be sharded as asked",
            items=found,
            expected="dense tensors, and None or Shard(dim) with -ndim <= dim < ndim from shard_placement_fn",
            fix="change what shard_placement_fn returns for them, or pass them in ignored_params",
        )


def _problem(param: nn.Parameter, mesh: DataParallelMesh, placement: Any) -> str | None:
    if is_lazy(param):
        return "has no shape yet; run a forward pass with an input of the right shape before"
    if isinstance(param, DTensor) and any(each.is_partial() for each in param.placements):
        return f"is a DTensor that waits for a reduction, with placements {param.placements}; redistribute it"
    if param.layout is not torch.strided:
        return f"is not dense but {param.layout}"
    if mesh.spmd is None and not isinstance(param, DTensor) and has_types(param):
        return "has spmd_types annotations, which need a full mesh with named axes, and dp_mesh_dims"
    problem = _problem_of_placement(param.ndim, placement)
    return problem if problem is not None or mesh.spmd is None else _problem_on_spmd_mesh(param, mesh.spmd)


def _problem_of_placement(ndim: int, placement: Any) -> str | None:
    if placement is not None and not isinstance(placement, Shard):
        return f"shard_placement_fn returned {placement!r}"
    if placement is not None and not -ndim <= placement.dim < max(ndim, 1):
        return f"Shard({placement.dim}) names a dim that it does not have"
    return None


def _problem_on_spmd_mesh(param: nn.Parameter, axes: SpmdAxes) -> str | None:
    if not isinstance(param, DTensor):
        if was_annotated(param):
            read = read_annotations(param, axes.mesh, axes.data)
            return read if isinstance(read, str) else None
        return (
            "is a plain tensor; with dp_mesh_dims, all parameters must be DTensors on the full SPMD mesh "
            "(distribute_module), or have annotations of spmd_types"
        )
    if param.device_mesh != axes.mesh:
        return (
            f"is a DTensor on {param.device_mesh}, and not on the same mesh that was passed to fully_shard, {axes.mesh}"
        )
    if not all(param.placements[axis].is_replicate() for axis in axes.data):
        names = axes.mesh.mesh_dim_names
        assert names is not None
        wrong = {names[axis]: param.placements[axis] for axis in axes.data if not param.placements[axis].is_replicate()}
        return f"Expected Replicate() on the data-parallel axes, but it has {wrong}"
    return None


def is_lazy(param: nn.Parameter) -> bool:
    """Whether the parameter is a lazy module's, which learns its shape at the first forward."""
    return isinstance(param, nn.UninitializedParameter)


def shard_spec(name: str, param: nn.Parameter, mesh: DataParallelMesh, placement: Shard | None) -> ShardSpec:
    """Place ``param`` over ``mesh``; ``placement`` None means Shard(0). ``refuse_unplaceable`` has accepted it.

    Raises: MeshError for a DTensor whose mesh does not go with ``mesh``.
    """
    dim = 0 if placement is None else placement.dim
    ndim = param.ndim
    local = torch_dtensors.local_of(param)
    order = memory_order(local)
    shape, strides = param.shape, param.stride()
    if order is None and not local.is_contiguous():  # overlapping or sliced: the shard becomes contiguous
        strides = contiguous_strides(shape)
    meta = TensorMeta(shape, strides, param.dtype)
    cut_dim = None
    if ndim > 0:
        dim %= ndim
        cut_dim = dim if order is None else order.index(dim)
    if mesh.shard_axis is None:
        cut_dim = None
    cut = Cut(tuple(local.shape) if order is None else tuple(local.shape[i] for i in order), cut_dim, mesh.shard_size)
    on_shard_axis = Replicate() if cut_dim is None else Shard(dim)
    if not isinstance(param, DTensor):
        if mesh.spmd is not None:
            return _of_annotated(param, order, cut, mesh, on_shard_axis)
        return ShardSpec(cut, order, DTensorSpec(mesh.mesh, mesh.placements(on_shard_axis), tensor_meta=meta))
    unsharded = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    if mesh.spmd is not None:
        return ShardSpec(cut, order, within_spmd_mesh(mesh, unsharded, on_shard_axis), unsharded, mesh.spmd.data)
    return ShardSpec(cut, order, beside_model_axes(name, mesh, unsharded, on_shard_axis), unsharded)


def _of_annotated(
    param: nn.Parameter, order: tuple[int, ...] | None, cut: Cut, mesh: DataParallelMesh, on_shard_axis: Placement
) -> ShardSpec:
    """Place a plain parameter on a full SPMD mesh, as this rank's part of a DTensor."""
    assert mesh.spmd is not None
    full = mesh.spmd.mesh
    annotations = read_annotations(param, full, mesh.spmd.data)
    assert isinstance(annotations, Annotations)
    shape = list(param.shape)
    for axis, placement in enumerate(annotations.placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= full.size(axis)
    strides = contiguous_strides(shape)
    if order is not None:
        in_memory = contiguous_strides([shape[dim] for dim in order])
        strides = tuple(in_memory[order.index(dim)] for dim in range(param.ndim))
    unsharded = DTensorSpec(
        full, annotations.placements, tensor_meta=TensorMeta(torch.Size(shape), strides, param.dtype)
    )
    return ShardSpec(
        cut, order, within_spmd_mesh(mesh, unsharded, on_shard_axis), unsharded, mesh.spmd.data, annotations
    )


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Dims from outermost to innermost in memory, if ``tensor`` is a dense permutation other than the identity."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else None
