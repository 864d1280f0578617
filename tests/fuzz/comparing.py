"""Whether a rank saw what the unsharded model says that it should have seen."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fuzz.program import Program, is_exact
from fuzz.running import Seen
from harness.subclasses import Wrapper
from harness.training import own_piece


def differences(actual: Seen, expected: Seen, program: Program, step: int) -> list[str]:
    """One line for each tensor that is not what it should be."""
    tolerance = 1e-9 if is_exact(program) else 2e-3
    found = []
    if [name for name, _ in actual.own] != [name for name, _ in expected.own]:
        return [f"step {step}: saw {[name for name, _ in actual.own]} instead of {[name for name, _ in expected.own]}"]
    for (name, ours), (_, theirs) in zip(actual.own, expected.own, strict=True):
        if program.unused and name.startswith("updates of ") and ours == 1 and theirs == 0:
            continue  # by zeros
        found += _difference(ours, theirs, tolerance, f"step {step}: {name}", floor=0.01)
    largest = max((grad.abs().max().item() for grad in expected.grads.values() if grad is not None), default=0.0)
    for name, theirs in expected.grads.items():
        ours = actual.grads[name]
        if theirs is None and ours is not None and program.unused and not _local(ours).any():
            continue  # zeros instead of None were asked for
        found += _difference(ours, theirs, tolerance, f"step {step}: gradient of {name}", floor=0.01 * largest)
    for name, theirs in expected.values.items():
        found += _difference(actual.values[name], theirs, tolerance, f"step {step}: value of {name}", floor=1.0)
    return found


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor._values if isinstance(tensor, Wrapper) else tensor


def _difference(ours: Tensor | None, theirs: Tensor | None, tolerance: float, what: str, floor: float) -> list[str]:
    """Every element within ``tolerance`` of the tensor's largest one, or of ``floor``."""
    if ours is None or theirs is None:
        if ours is theirs:
            return []
        return [f"{what}: {'None' if ours is None else 'there'}, should be {'None' if theirs is None else 'there'}"]
    if ours.shape != theirs.shape:
        return [f"{what}: {tuple(ours.shape)} instead of {tuple(theirs.shape)}"]
    piece = own_piece(theirs, ours) if isinstance(ours, DTensor) else theirs
    ours, piece = _local(ours).detach().double(), piece.detach().double()
    if ours.shape != piece.shape:
        return [f"{what}: a shard of {tuple(ours.shape)} instead of {tuple(piece.shape)}"]
    if ours.numel() == 0:
        return []
    off = (ours - piece).abs().max().item()
    bound = tolerance * max(theirs.abs().max().item(), floor)
    if off <= bound and torch.isfinite(ours).all():
        return []
    largest = piece.abs().max().item()
    ratio = (ours * piece).sum().item() / max((piece * piece).sum().item(), 1e-300)
    return [f"{what}: off by {off:.3g} where the largest is {largest:.3g} (about {ratio:.3g} times what it should be)"]
