"""Whole tensors on rank 0's CPU: the state of a sharded model and its optimizer as if nothing had been sharded.

Ranks send one tensor after another to rank 0 in bands; no other rank and no device ever holds a whole one. The result
equals the unsharded model's ``state_dict()`` and its optimizer's, ties included.

Worked example, a model of 100 equal layers of 1 GB on 8 ranks: rank 0 ends with 100 GB in host memory; in addition to that and its
shards, a rank holds 128 MiB at a time.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..arguments import OPTIMIZER, SWITCH, checked_path, require
from ..core.comm.agreement import agree_on_meshes, agree_over, default_group
from ..core.plan.mesh import device_of
from ..durable import replaced_file, sync_folder
from ..errors import FSDPError
from ..hangs.joint_calls import joint
from .checkpoint_folder import locked
from .failures import from_rank_0, on_every_rank, tried
from .gather_to_writers import BandStream
from .lazy_tensors import State
from .model_tensors import LazyParameter, ModelTensor, checked_model, meshes_of, reshard
from .safetensors_plan import Band, PlannedTensor
from .training_state import clean_name, map_values, named_model_state, named_optimizer_state, names_in, numbered_optimizer_state

BAND_NBYTES = 64 << 20


@joint
def full_state_dict(model: nn.Module) -> State:
    """The model's state on rank 0, in host memory; {} on the other ranks.

    The form is that of FSDP1's ``FullStateDictConfig(offload_to_cpu=True, rank0_only=True)``. Tied names share one
    tensor.

    Collective: yes, over the meshes of the parameters
    Memory:     rank 0's result in host memory; besides that and its shards, each rank holds two bands of 64 MiB
    Raises:     on every rank of these meshes, the error of one

    Example:
        state = fsdp2.checkpoint.full_state_dict(model)  # {} but on rank 0
        if dist.get_rank() == 0:
            torch.save(state, folder / "model.pt")
    """
    checked_model(model, "full_state_dict")
    return entries_on_rank_0(model, None)


def entries_on_rank_0(model: nn.Module, names: Collection[str] | None) -> State:
    """``full_state_dict`` of ``names`` alone; None: of all."""

    def take() -> State:
        state = named_model_state(model)
        owned = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        first_name: dict[int, str] = {}
        tied_to = {clean_name(name): first_name.setdefault(id(tensor), clean_name(name)) for name, tensor in owned}
        tied = {name: state[first] if (first := tied_to.get(name, name)) in state else value for name, value in state.items()}
        return tied if names is None else {name: value for name, value in tied.items() if name in names}

    return _on_rank_0(model, "cannot gather the model's state", take)


@joint
def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, *, by_name: bool = False) -> State:
    """The optimizer's state on rank 0, in host memory; {} on the other ranks.

    by_name:    False: what the unsharded model's optimizer takes by ``load_state_dict``, with parameters as numbers;
                True: with their names, what ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`` takes
    Collective: yes, over the meshes of the parameters
    Memory:     rank 0's result in host memory; besides that and its shards, each rank holds two bands of 64 MiB
    Raises:     on every rank of these meshes, the error of one

    Example:
        state = fsdp2.checkpoint.full_optimizer_state_dict(model, optimizer, by_name=True)  # {} but on rank 0
    """
    checked_model(model, "full_optimizer_state_dict")

    def take() -> State:
        require("full_optimizer_state_dict", OPTIMIZER, optimizer=optimizer)
        require("full_optimizer_state_dict", SWITCH, by_name=by_name)
        reshard(model)
        state = named_optimizer_state(model, optimizer)
        return state if by_name else numbered_optimizer_state(state, names_in(model, optimizer))

    return _on_rank_0(model, "cannot gather the optimizer's state", take)


@joint
def save_full_state(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Write the full state to one file with ``torch.save``, for ``torch.load(path, weights_only=True)``.

    path:       written by rank 0, which creates the folders; a rename at the end replaces an earlier file
    optimizer:  None: the file is the model's state dict alone; else ``{"model": ..., "optimizer": ...}``, the latter with
                parameters as numbers and, for ``fsdp2 convert``, "param_names" next to "state" and "param_groups"
    Collective: yes, over all ranks and over the meshes of the parameters
    Memory:     rank 0's result in host memory; besides that and its shards, each rank holds two bands of 64 MiB
    Raises:     CheckpointError on every rank if the file cannot be written; an earlier file is then unchanged

    Example:
        fsdp2.checkpoint.save_full_state(folder / "full.pt", model, optimizer)
        torch.load(folder / "full.pt", weights_only=True).keys()  # model, optimizer
    """

    def take() -> State:
        require("save_full_state", OPTIMIZER.or_none, optimizer=optimizer)
        state = full_state_dict(model)
        if optimizer is None:
            return state
        names = [name for group in names_in(model, optimizer) for name in group]
        whole = full_optimizer_state_dict(model, optimizer) | {"param_names": names}  # load_state_dict does not look at these
        return {"model": state, "optimizer": whole}

    what = f"cannot write the full state to {path}"
    state = on_every_rank(default_group(), what, take)
    from_rank_0(default_group(), what, lambda: _write(state, checked_path("save_full_state", "path", path)))


def _write(state: State, path: Path) -> None:
    with locked(path.with_name(f".{path.name}.lock")):
        with replaced_file(path, path.with_name(f"{path.name}.partial")) as file:
            torch.save(state, file)
        sync_folder(path.parent)


# --- gathering --------------------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def _on_rank_0(model: nn.Module, what: str, take: Callable[[], State]) -> State:
    """On rank 0 the result of ``take`` with copies of whole tensors in host memory; {} on the other ranks.

    take:       not collective
    Collective: yes, over the meshes of the model. A mesh without rank 0 only learns whether all succeeded
    Raises:     on every rank of these, the error of one
    """
    taken, problem = tried(what, lambda: _Gathered(take(), what))
    meshes = meshes_of(model)
    agree_on_meshes(meshes, problem)
    problem = taken[0].gather()
    result, problem = tried(what, taken[0].result) if problem is None else ([], problem)
    agree_on_meshes(meshes, problem)
    return result[0]


class _Gathered:
    """The leaves of ``state``, on their way to rank 0."""

    def __init__(self, state: State, what: str) -> None:
        self._state = state
        self._what = what
        self._whole: dict[int, Tensor] = {}  # on rank 0, by id of the DTensor
        self._leaf_of: dict[PlannedTensor, int] = {}
        self._streamed: dict[DeviceMesh, list[PlannedTensor]] = {}
        self._others: list[DTensor] = []  # a reduction that is pending, a tensor subclass, ...: torch knows
        leaves: dict[int, DTensor] = {}
        map_values(lambda leaf: leaves.setdefault(id(leaf), leaf) if isinstance(leaf, DTensor) else None, state)
        for leaf in leaves.values():
            mesh = leaf.device_mesh
            if mesh.get_coordinate() is None or not (mesh.mesh == 0).any():
                continue
            source = ModelTensor(["a parameter"], [({"value": leaf}, "value")])
            if source.problem() is not None:
                self._others.append(leaf)
            else:
                planned = PlannedTensor(LazyParameter(source), source.name, leaf.dtype)
                self._leaf_of[planned] = id(leaf)
                self._streamed.setdefault(mesh, []).append(planned)

    def gather(self) -> FSDPError | None:
        """The first problem, if any. Collective: yes, over every mesh with rank 0, even after a problem."""
        problem: FSDPError | None = None
        for mesh, tensors in self._streamed.items():
            bands = (band for tensor in tensors for band in tensor.bands(BAND_NBYTES))
            _, problem = tried(self._what, partial(_stream_over(mesh, self._what).run, {0: bands}, self._receive, problem))
        for leaf in self._others:
            _, problem = tried(self._what, partial(self._gather_other, leaf, problem))
        return problem

    def _receive(self, band: Band, values: Tensor) -> None:
        leaf = self._leaf_of[band.tensor]
        if leaf not in self._whole:
            self._whole[leaf] = torch.empty(band.tensor.shape, dtype=band.tensor.dtype, device="cpu")
        self._whole[leaf][band.box.slices] = values

    def _gather_other(self, leaf: DTensor, problem: FSDPError | None) -> None:
        agree_on_meshes([leaf.device_mesh], problem)
        whole = leaf.full_tensor()
        if _is_rank_0():
            self._whole[id(leaf)] = whole.to("cpu", copy=True)

    def result(self) -> State:
        return map_values(self._result_of, self._state) if _is_rank_0() else {}

    def _result_of(self, leaf: Any) -> Any:
        """The result for a leaf; the same for all names of a tensor."""
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        if isinstance(leaf, DTensor) and leaf.device_mesh.get_coordinate() is None:
            return None  # rank 0 has no shard of it
        if id(leaf) not in self._whole:
            if isinstance(leaf, DTensor):  # without elements there are no bands
                self._whole[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            else:
                self._whole[id(leaf)] = leaf.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return self._whole[id(leaf)]


def _stream_over(mesh: DeviceMesh, what: str) -> BandStream:
    """A stream among its ranks. Other ranks of the group need not take part: see Note: first collective of a group."""
    group, everybody = default_group(), True
    if group is not None and mesh.size() < group.size():
        everybody = mesh.ndim == 1
        group = mesh.get_group(0) if everybody else group

    def ready(problem: FSDPError | None) -> None:
        if group is not None and everybody:
            agree_over([(group, device_of(mesh))], problem)
        else:
            agree_on_meshes([mesh], problem)

    return BandStream(group, ready, BAND_NBYTES, what=what, everybody=everybody)


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
