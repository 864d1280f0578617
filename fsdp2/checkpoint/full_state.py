"""Whole tensors on rank 0's CPU: the state of a sharded model and its optimizer as if nothing had been sharded.

One tensor after another is sent to rank 0 in bands; no other rank, and no device, ever has one whole. What comes out is what the
unsharded model's ``state_dict()`` and its optimizer's would be, ties included. It refuses to know how tensors are sharded.

Worked example, a model of 100 equal layers of 1 GB on 8 ranks: rank 0 ends with 100 GB in host memory; beside that and its shards a
rank holds 128 MiB at a time.

Note: memory of full state. Beside rank 0's result (in host memory) and its shards, a rank holds two bands of 64 MiB.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .agreement import default_group
from .bands import BandStream
from .every_rank import from_rank_0
from .kept import Kept
from .model_tensors import ModelTensor, checked_model, reshard
from .named_state import (
    State,
    clean_name,
    map_values,
    named_model_state,
    named_optimizer_state,
    names_in,
    numbered_optimizer_state,
)
from .save_plan import Band, PlannedTensor

BAND_NBYTES = 64 << 20


def full_state_dict(model: nn.Module) -> State:
    """The model's state on rank 0, in host memory; {} on the other ranks.

    What FSDP1's ``FullStateDictConfig(offload_to_cpu=True, rank0_only=True)`` gave. Tied tensors are one tensor under several names.

    Collective: yes, over the meshes of the parameters
    Memory:     see Note: memory of full state
    """
    with torch.inference_mode(False), torch.no_grad():
        state = named_model_state(checked_model(model, "full_state_dict"))
    owned = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first_name: dict[int, str] = {}
    tied_to = {clean_name(name): first_name.setdefault(id(tensor), clean_name(name)) for name, tensor in owned}
    result: State = {}
    for name, value in state.items():
        first = tied_to.get(name, name)
        result[name] = result[first] if first in result else _on_rank_0(value)
    return result if _is_rank_0() else {}


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, *, by_name: bool = False) -> State:
    """The optimizer's state on rank 0, in host memory; {} on the other ranks.

    by_name:    False: what the unsharded model's optimizer takes by ``load_state_dict``, with parameters as numbers;
                True: with their names, what ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`` takes
    Collective: yes, over the meshes of the parameters
    Memory:     see Note: memory of full state
    """
    reshard(checked_model(model, "full_optimizer_state_dict"))
    names = names_in(model, optimizer)
    whole: State = map_values(_on_rank_0, named_optimizer_state(model, optimizer))
    if not _is_rank_0():
        return {}
    return whole if by_name else numbered_optimizer_state(whole, names)


def save_full_state(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Write the full state to one file with ``torch.save``, for ``torch.load(path, weights_only=True)``.

    path:       written by rank 0, which makes its folders; what was there before is replaced at the end, at once
    optimizer:  None: the file is the model's state dict alone; else ``{"model": ..., "optimizer": ...}``, the latter with
                parameters as numbers; beside its "state" and "param_groups" are "param_names", by which ``fsdp2 convert`` knows them
    Collective: yes, over all ranks and over the meshes of the parameters
    Memory:     see Note: memory of full state
    Raises:     CheckpointError on every rank if the file cannot be written; what was there before is still there
    """
    state = full_state_dict(model)
    if optimizer is not None:
        names = [name for group in names_in(model, optimizer) for name in group]
        whole = full_optimizer_state_dict(model, optimizer) | {"param_names": names}  # load_state_dict does not look at these
        state = {"model": state, "optimizer": whole}
    from_rank_0(default_group(), f"cannot write the full state to {path}", lambda: _write(state, Path(path)))


def _write(state: State, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@torch.inference_mode(False)
@torch.no_grad()
def _on_rank_0(value: Any) -> Any:
    """A leaf of a state dict, whole, in host memory, sharing nothing; on the other ranks None."""
    if isinstance(value, DTensor):
        return _brought(value)
    if not _is_rank_0():
        return None
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _brought(value: DTensor) -> Tensor | None:
    """``value`` on rank 0, in bands; None on the others, and where rank 0 is not on its mesh. Collective: yes, over its mesh."""
    mesh = value.device_mesh
    if mesh.get_coordinate() is None or not (mesh.mesh == 0).any():
        return None
    source = ModelTensor(["value"], [({"value": value}, "value")])
    if source.problem() is not None:  # a reduction that is pending, a tensor subclass, ...: torch knows
        whole = value.full_tensor()
        return whole.to("cpu", copy=True) if _is_rank_0() else None
    planned = PlannedTensor(Kept(source), "value", tuple(value.shape), value.dtype)
    whole = torch.empty(value.shape, dtype=value.dtype, device="cpu" if _is_rank_0() else "meta")

    def receive(band: Band, values: Tensor) -> None:
        whole[band.box.slices] = values

    BandStream(default_group()).run({0: planned.bands(BAND_NBYTES)}, receive)
    return whole if _is_rank_0() else None


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
