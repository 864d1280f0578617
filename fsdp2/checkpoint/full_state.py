"""Whole tensors on rank 0's CPU: the state of a sharded model and its optimizer as if nothing had been sharded.

One tensor after another is gathered and copied to rank 0's host memory; on the other ranks it is dropped. What comes out is what
the unsharded model's ``state_dict()`` and its optimizer's would be, ties included. It refuses to know how tensors are sharded.

Worked example, a model of 100 equal layers of 1 GB on 8 ranks: rank 0 ends with 100 GB in host memory; on every rank's device
there is 1 GB at a time beside its shards.

Note: memory of full state. Beside rank 0's result (in host memory) and its shards, a rank holds one whole tensor, twice if it is
not cut evenly on dim 0 (the gathered pieces, and these put together). A thread of gloo may hold the one before a moment longer.
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

from ..core import torch_compat as compat
from .agreement import default_group
from .every_rank import from_rank_0
from .model_tensors import checked_model, reshard
from .named_state import (
    State,
    clean_name,
    map_values,
    named_model_state,
    named_optimizer_state,
    names_in,
    numbered_optimizer_state,
)


def full_state_dict(model: nn.Module) -> State:
    """The model's state on rank 0, in host memory; {} on the other ranks.

    What FSDP1's ``FullStateDictConfig(offload_to_cpu=True, rank0_only=True)`` gave. Tied tensors are one tensor under several names.

    Collective: yes, over the meshes of the parameters
    Memory:     see Note: memory of full state
    """
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
                parameters as numbers
    Collective: yes, over all ranks and over the meshes of the parameters
    Memory:     see Note: memory of full state
    Raises:     CheckpointError on every rank if the file cannot be written; what was there before is still there
    """
    state = full_state_dict(model)
    if optimizer is not None:
        state = {"model": state, "optimizer": full_optimizer_state_dict(model, optimizer)}
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


def _on_rank_0(value: Any) -> Any:
    """A leaf of a state dict, whole, in host memory, sharing nothing; on the other ranks something small."""
    if isinstance(value, DTensor):
        value = _whole(value)
    if not _is_rank_0():
        return None
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    whole = value.detach()
    return whole.to("cpu", copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def _whole(value: DTensor) -> Tensor:
    local = compat.local_tensor(value)
    kind = value.device_mesh.device_type
    if local.device.type != kind:  # offloaded: the mesh cannot gather what lies in host memory
        value = compat.new_dtensor(local.to(kind), compat.spec_of(value))
    return value.full_tensor()


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
