"""All ranks begin with the same model: they compare what their callers passed, then rank 0 broadcasts its values."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..core.comm.collective_log import during
from ..core.plan.mesh import device_of
from ..errors import ModuleError
from ..torch_names import torch_dtensors, torch_modules


def require_same(mesh: DeviceMesh, facts: Iterable[str], what: str) -> None:
    """Raise ModuleError on every rank if ``facts`` are not the same on all ranks of ``mesh``. Collective: yes, over the mesh."""
    facts = list(facts)
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    lowest_and_negated_highest = torch.tensor([number, -number], dtype=torch.int64, device=device_of(mesh))
    for process_group in _process_groups(mesh):
        with during("comparison of models", process_group, lowest_and_negated_highest):
            dist.all_reduce(lowest_and_negated_highest, op=dist.ReduceOp.MIN, group=process_group)
    lowest, negated_highest = lowest_and_negated_highest.tolist()
    if lowest != -negated_highest:
        raise ModuleError(
            f"{what} differ between ranks",
            items=_first_difference(_gathered(facts, mesh)),
            expected="on all ranks the same arguments, and of all tensors names, shapes, dtypes, requires_grad, on meta or not",
            fix="build the same model with the same arguments on every rank",
        )


def _gathered(facts: list[str], mesh: DeviceMesh) -> dict[int, list[str]]:
    """The facts of each rank. Collective: yes, over the mesh."""
    known = {dist.get_rank(): facts}
    for process_group in _process_groups(mesh):
        told: list[Any] = [None] * process_group.size()
        with during("comparison of models", process_group):
            dist.all_gather_object(told, known, group=process_group)
        known = {rank: theirs for each in told for rank, theirs in each.items()}
    return dict(sorted(known.items()))


def _first_difference(by_rank: dict[int, list[str]]) -> list[str]:
    """The first fact that ranks do not share, as each rank has it."""
    for at_one_place in itertools.zip_longest(*by_rank.values(), fillvalue="nothing more"):
        ranks: dict[str, list[str]] = {}
        for rank, fact in zip(by_rank, at_one_place, strict=True):
            ranks.setdefault(fact, []).append(str(rank))
        if len(ranks) > 1:
            return [f"{'rank' if len(each) == 1 else 'ranks'} {', '.join(each)}: {fact}" for fact, each in ranks.items()]
    return []


def free_tensors(model: nn.Module, ignored: Iterable[nn.Parameter]) -> list[tuple[str, Tensor]]:
    """Names and values of all parameters and buffers, each once, but for those of sharded modules and ``ignored``."""
    skipped = {id(param) for param in ignored}
    found = []
    managed = {
        id(below)
        for module in model.modules()
        if {"fully_shard", "replicate"} & set(torch_modules.applied_apis(module))
        for below in module.modules()
    }
    for prefix, module in model.named_modules():
        if id(module) in managed:
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in skipped:
                skipped.add(id(tensor))
                found.append((f"{prefix}.{name}" if prefix else name, tensor))
    return found


def described(tensors: Sequence[tuple[str, Tensor]]) -> list[str]:
    return [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {tensor.is_meta}"
        if not isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
        else f"{name} lazy"
        for name, tensor in tensors
    ]


@torch.no_grad()
def broadcast(mesh: DeviceMesh, device: torch.device, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Give each of ``tensors`` the values of the first rank of ``mesh``, in place; of a DTensor, its local tensor.

    A tensor on the meta device, without a shape yet, or of a subclass with memory of its own keeps its values.
    device:     this rank's of the mesh
    Collective: yes, over the mesh; one broadcast a tensor and axis
    Memory:     one tensor more, if it is not on ``device``
    """
    process_groups = _process_groups(mesh)
    for _, tensor in tensors:
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            continue
        local = torch_dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        if local.is_meta or type(local) is not Tensor or local.numel() == 0:
            continue
        moved = local.to(device).contiguous()
        flat = moved.view(-1).view(torch.uint8)
        for process_group in process_groups:
            with during("broadcast of the model", process_group, flat):
                dist.broadcast(flat, group=process_group, group_src=0)
        if moved.data_ptr() != local.data_ptr() or moved.device != local.device:
            local.copy_(moved)


def _process_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The axes from the last to the first: the first rank's values go along its row, then along every column."""
    return [group for axis in reversed(range(mesh.ndim)) if (group := mesh.get_group(axis)).size() > 1]
