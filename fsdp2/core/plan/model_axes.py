"""Parameters that already are DTensors: tensor, sequence and expert parallelism combined with data parallelism.

Such a parameter is cut on *model axes* of the job's mesh; each rank's local tensor is then cut over the shard axis. The
sharded parameter is a DTensor on data-parallel and model axes together, the unsharded one on its own mesh again.

Note: gradients on a full SPMD mesh. There, data-parallel axes are axes of the parameter's own mesh, and DTensor places
a gradient on them: Partial, if each rank holds the term of its own rows; Replicate, if DTensor has added the terms
already (as it does after an operation that is not linear in the parameter) or if all ranks have computed the same. FSDP
averages terms. Added terms must be divided like the others, or the gradient is too large by a factor, the number of
ranks. So a Replicate gradient counts once, not once per rank, over every axis over which some activation or gradient of
the model was seen to vary. Over an axis where none varies, the ranks repeat one computation, and the average of equal
gradients is the gradient. If the user sets a divide factor, they want sums, and Replicate always counts once.

Worked example: a (8, 4) weight, ColwiseParallel on tp, on the mesh ("dp", "tp") of 2 x 2 ranks

    unsharded   on tp       (Shard(0),)                                     rank (dp 1, tp 0) computes with rows [0, 4)
    sharded     on dp, tp   (_StridedShard(0, split_factor=2), Shard(0))    and keeps [2, 4): tp cuts first, dp second
    gradient    on tp       as DTensor left it, maybe Partial or Replicate  becomes (Shard(0),) before the reduction
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ...errors import MeshError, ParameterError
from ...torch_names import torch_dtensors
from ...torch_names.torch_dtensors import DTensorSpec
from .layout import rows_of
from .mesh import DataParallelMesh


def beside_model_axes(name: str, mesh: DataParallelMesh, model: DTensorSpec, on_shard_axis: Placement) -> DTensorSpec:
    """Spec of a parameter with ``model``'s placements whose local tensor is ``on_shard_axis`` over ``mesh``.

    Raises: MeshError if both meshes are not slices of one.
    """
    try:
        both = torch_dtensors.concatenate_meshes([mesh.mesh, model.mesh])
    except Exception as error:
        raise MeshError(
            f"{name} is a DTensor on {model.mesh}, which does not go with the data-parallel mesh {mesh.mesh}: {error}",
            expected="two slices of one mesh with named axes, that have no axis in common",
            fix='make one mesh, say ("dp", "tp"), and pass mesh["tp"] to parallelize_module '
            'and mesh["dp"] to fully_shard; '
            "if the parameter lies on the data-parallel axes as well, pass dp_mesh_dims",
        ) from error
    on_shard_axis = _cut_after(on_shard_axis, model, range(model.mesh.ndim))
    return DTensorSpec(both, (*mesh.placements(on_shard_axis), *model.placements), tensor_meta=model.tensor_meta)


def within_spmd_mesh(mesh: DataParallelMesh, model: DTensorSpec, on_shard_axis: Placement) -> DTensorSpec:
    """Spec of a parameter on the full SPMD mesh whose local tensor is ``on_shard_axis`` over the axes that shard.

    Several such axes become one flat axis at the place of the first, after the axes that replicate.
    """
    axes = mesh.spmd
    assert axes is not None
    if not isinstance(on_shard_axis, Shard) or len(axes.shard) == 1:
        placements = list(model.placements)
        for axis in axes.shard:
            placements[axis] = _cut_after(on_shard_axis, model, range(axis + 1, model.mesh.ndim))
        return DTensorSpec(model.mesh, tuple(placements), tensor_meta=model.tensor_meta)
    names = model.mesh.mesh_dim_names
    assert names is not None
    meshes: list[DeviceMesh] = []
    flat: list[Placement] = []
    for axis, name in enumerate(names):
        if axis == axes.shard[0]:
            meshes.append(mesh.mesh)
            flat += mesh.placements(_cut_after(on_shard_axis, model, range(axis + 1, model.mesh.ndim)))
        elif axis not in axes.data:
            meshes.append(model.mesh[name])
            flat.append(model.placements[axis])
    return DTensorSpec(torch_dtensors.concatenate_meshes(meshes), tuple(flat), tensor_meta=model.tensor_meta)


def without_axes(model: DTensorSpec, axes: tuple[int, ...]) -> DTensorSpec | None:
    """``model`` on the other axes of its mesh only; None if there are no others."""
    names = model.mesh.mesh_dim_names
    kept = [axis for axis in range(model.mesh.ndim) if axis not in axes]
    if len(kept) == model.mesh.ndim:
        return model
    if not kept or names is None:
        return None
    mesh = model.mesh[tuple(names[axis] for axis in kept)]
    return DTensorSpec(mesh, tuple(model.placements[axis] for axis in kept), tensor_meta=model.tensor_meta)


def _cut_after(placement: Placement, model: DTensorSpec, axes: Iterable[int]) -> Placement:
    """``placement`` of a cut that comes after the cuts on ``axes``, although its own axis stands before them."""
    if not isinstance(placement, Shard):
        return placement
    factor = 1
    for axis in axes:
        if torch_dtensors.shard_dim(model.placements[axis]) == placement.dim:
            factor *= model.mesh.size(axis)
    return torch_dtensors.strided_shard(placement.dim, factor) if factor > 1 else placement


def own_piece(whole: Tensor, model: DTensorSpec) -> Tensor:
    """This rank's piece of ``whole``, if it is placed as ``model`` says; a view."""
    for axis, placement in enumerate(model.placements):
        dim = torch_dtensors.shard_dim(placement)
        if dim is not None:
            rows = rows_of(whole.shape[dim], model.mesh.get_local_rank(axis), model.mesh.size(axis))
            whole = whole.narrow(dim, rows.start, len(rows))
    return whole


def local_gradient(
    name: str,
    grad: Tensor,
    model: DTensorSpec,
    data_axes: tuple[int, ...],
    once: frozenset[int],
    dtype: torch.dtype | None,
) -> Tensor:
    """The local tensor of a gradient: placed like its parameter on model axes; on data-parallel axes, this rank's term.

    data_axes:  axes of ``model.mesh`` over which the gradient is going to be reduced
    once:       data axes over which a Replicate gradient counts once, not once per rank
    dtype:      in which it is redistributed over model axes, where terms may be added up; None: the gradient's own
    Collective: yes, over axes where it has to be redistributed.
    """
    if not isinstance(grad, DTensor):
        raise ParameterError(
            f"{name} is a DTensor, but its gradient is a {type(grad).__name__}",
            expected="a DTensor",
            fix="use the parameter through DTensor's own operations; to_local() if you need its local tensor",
        )
    target = list(model.placements)
    copies = 1
    for axis in data_axes:
        if grad.placements[axis].is_partial("sum"):
            target[axis] = grad.placements[axis]
        elif axis in once:
            copies *= model.mesh.size(axis)
    if grad.placements != tuple(target):
        grad = grad if dtype is None else cast(DTensor, grad.to(dtype))
        grad = grad.redistribute(placements=target)
    local = torch_dtensors.waited_for(torch_dtensors.local_tensor(grad))
    return local if copies == 1 else local / copies


def varying_axes(tensor: Tensor) -> Iterable[str]:
    """Names of the mesh axes over which ranks hold different pieces or terms of ``tensor``; none for a plain tensor."""
    if isinstance(tensor, DTensor):
        for placement, name in zip(tensor.placements, tensor.device_mesh.mesh_dim_names or (), strict=False):
            if not placement.is_replicate():
                yield name
