"""Whether a rank saw what the unsharded model says that it should have seen.

How far rounding may carry a program, the unsharded model tells: run in fp32, with its data, and in fp64, it differs by
``amplified``. Most programs amplify nothing, and must be right to 1e-4 where a part of them is in fp32; where gradients reach 1e5 in
the third step, fp32 may leave two digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fuzz.program import Program, is_exact
from fuzz.running import Seen
from harness.subclasses import Wrapper
from harness.training import own_piece

FP32, FP64 = 2.0**-24, 2.0**-53
MARGIN = 16.0  # how much more than the rounding of the unsharded model is rounding still
TOO_ROUGH = 0.05  # a tolerance beyond which a part of a gradient that is missing looks like rounding


def tolerance_of(program: Program, amplified: float = 0.0) -> float:
    """How much of a tensor's largest element may be rounding; from ``TOO_ROUGH`` on, numbers say nothing.

    amplified: by how much fp32 changes the unsharded model, if that was measured
    """
    if amplified > 0.5:  # then fp32 has nothing to do with fp64 any more, and no longer tells by how much
        return math.inf
    if is_exact(program):
        return 1e-9 + MARGIN * amplified * FP64 / FP32
    return 1e-4 + MARGIN * amplified


def amplified_rounding(rounded: Seen, exact: Seen, program: Program) -> float:
    """By how much a step in fp32 differs from the same in fp64, in the tensor that differs most, relative to its largest element."""
    largest = 0.0
    for _, ours, theirs, floor in _pairs(rounded, exact, program):
        if ours is not None and theirs is not None and ours.numel() > 0:
            off = (ours.double() - theirs.double()).abs().max().item()
            largest = max(largest, off / max(theirs.abs().max().item(), floor) if math.isfinite(off) else math.inf)
    return largest


def differences(actual: Seen, expected: Seen, program: Program, step: int, tolerance: float) -> list[str]:
    """One line for each tensor that is not what it should be: farther off than ``tolerance`` of its largest element."""
    if [name for name, _ in actual.own] != [name for name, _ in expected.own]:
        return [f"step {step}: saw {[name for name, _ in actual.own]} instead of {[name for name, _ in expected.own]}"]
    found = []
    for what, ours, theirs, floor in _pairs(actual, expected, program):
        found += _difference(ours, theirs, tolerance, f"step {step}: {what}", floor)
    return found


def _pairs(actual: Seen, expected: Seen, program: Program) -> Iterator[tuple[str, Tensor | None, Tensor | None, float]]:
    """What it is, as it is and as it should be, and the magnitude below which differences count as if it was as large."""
    for (name, ours), (_, theirs) in zip(actual.own, expected.own, strict=True):
        if program.unused and name.startswith("updates of ") and ours == 1 and theirs == 0:
            continue  # by zeros
        yield name, ours, theirs, 0.01
    largest = max((grad.abs().max().item() for grad in expected.grads.values() if grad is not None), default=0.0)
    for name, theirs in expected.grads.items():
        ours = actual.grads[name]
        if theirs is None and ours is not None and program.unused and not _local(ours).any():
            continue  # zeros instead of None were asked for
        yield f"gradient of {name}", ours, theirs, 0.01 * largest
    for name, theirs in expected.values.items():
        yield f"value of {name}", actual.values[name], theirs, 1.0


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
    if ours.numel() == 0 or tolerance == math.inf:
        return []
    off = (ours - piece).abs().max().item()
    bound = tolerance * max(theirs.abs().max().item(), floor)
    if off <= bound and torch.isfinite(ours).all():
        return []
    largest = piece.abs().max().item()
    ratio = (ours * piece).sum().item() / max((piece * piece).sum().item(), 1e-300)
    return [f"{what}: off by {off:.3g} where the largest is {largest:.3g} (about {ratio:.3g} times what it should be)"]
