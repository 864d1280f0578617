"""What ``--parity`` counts as a difference between two runs: losses, gradients and parameters in each step; it reports the first.

Rounding may differ, and how much depends on the arithmetic: 1e-4 where both runs compute in fp32, 2e-2 where both do in bf16 or fp16.
Parameters need more than that: Adam divides a gradient by its own size, and so moves an element whose gradient is nothing but
rounding by a whole learning rate, in a different direction in each run. How far two correct runs may diverge at an element is
therefore measured in multiples of the distance by which a step moves its parameter:

    lr 0.1, gradients of one tensor    1.0       0.02      1e-6, all of it rounding
    may diverge, in bf16, per step     0.008     0.2       0.2, twice the learning rate
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TOLERANCE, _NARROW_TOLERANCE = 1e-4, 2e-2
_NEGLIGIBLE = 0.1
"""A share of the model's largest gradient; smaller ones are measured against it: their rounding comes from sums of larger ones."""


@dataclass(frozen=True)
class Run:
    """The records of one side's processes: by rank, then by step."""

    folder: Path
    status: int
    said: str
    ranks: list[list[dict[str, Any]]]
    hangs: str = ""  # where it was, and its last output, if it was ended because it took too long

    @property
    def num_steps(self) -> int:
        return min((len(steps) for steps in self.ranks), default=0)

    @property
    def is_narrow(self) -> bool:
        """Whether a tensor in it was computed in bf16 or fp16."""
        return any(step.get("narrow") for step in self.ranks[0])

    def tensors(self, step: int, kind: str) -> dict[str, Any]:
        """The "params" or "gradients" of a step, by name."""
        import torch

        found: dict[str, Any] = torch.load(self.folder / f"step{step + 1}.pt", weights_only=True)[kind]
        return found

    @property
    def last_error(self) -> str:
        return next((line.strip() for line in self.said.splitlines() if "Error:" in line), "")


def first_difference(old: Run, new: Run, tolerance: float | None) -> str:
    """The first place where two runs differ by more than ``tolerance``, relative; "" if there is none.

    tolerance: None: as much as the arithmetic of both runs explains
    """
    return next(_differences(old, new, tolerance), "")


def _differences(old: Run, new: Run, tolerance: float | None) -> Iterator[str]:
    within = tolerance or (_NARROW_TOLERANCE if old.is_narrow and new.is_narrow else _TOLERANCE)
    allowed = _Allowed(old, new, within)
    for step in range(min(old.num_steps, new.num_steps)):
        place = f"step {step + 1}"
        for rank, (before, after) in enumerate(zip(old.ranks, new.ranks, strict=True)):
            losses, others = before[step]["losses"], after[step]["losses"]
            if len(losses) != len(others):
                yield f"{place}, rank {rank}: {len(losses)} backward passes, and {len(others)} in the new script"
            for index, (mine, other) in enumerate(zip(losses, others, strict=False)):
                if not _close(mine, other, within):
                    yield f"{place}, rank {rank}: loss {index + 1} is {mine:.8g}, and {other:.8g} in the new script"
        norm, other_norm = old.ranks[0][step]["norm"], new.ranks[0][step]["norm"]
        if not _close(norm, other_norm, within):
            yield f"{place}: the gradient norm is {norm:.8g}, and {other_norm:.8g} in the new script"
        mine, other = old.tensors(step, "gradients"), new.tensors(step, "gradients")
        # FSDP1 shows only the norm of its gradients; then only the new run's are known.
        known = {name: grad.double() for name, grad in {**mine, **other}.items() if grad.numel()}
        total = math.sqrt(sum(float(grad.norm()) ** 2 for grad in known.values()))
        for name in mine:
            if name in other and mine[name].shape == other[name].shape:
                size, difference = float(mine[name].double().norm()), float((mine[name].double() - other[name].double()).norm())
                if difference > within * max(size, _NEGLIGIBLE * total):
                    yield f"{place}: the gradient of {name} differs by {difference:.3g}, and its norm is {size:.3g}"
        allowed.add(step, known)
        mine, other = old.tensors(step, "params"), new.tensors(step, "params")
        for name in {**mine, **other}:
            found = _difference(mine.get(name), other.get(name), allowed.at.get(name, 0), tolerance or _TOLERANCE, step)
            if found:
                yield f"after {place}: parameter {name}: {found}"
    if old.num_steps != new.num_steps:
        yield f"the old script took {old.num_steps} steps, the new one {new.num_steps}: {old.last_error or new.last_error}"


def _close(mine: float, other: float, tolerance: float) -> bool:
    both_nan = math.isnan(mine) and math.isnan(other)
    return both_nan or math.isclose(mine, other, rel_tol=tolerance, abs_tol=tolerance * 1e-6)


class _Allowed:
    """How far two correct runs may be apart after the steps so far: ``at``, by parameter and element.

    within: relative, of gradients
    """

    def __init__(self, old: Run, new: Run, within: float) -> None:
        self._runs, self._within = (old, new), within
        self._squares: dict[str, Any] = {}
        self.at: dict[str, Any] = {}

    def add(self, step: int, gradients: dict[str, Any]) -> None:
        """Add the distance that this step may take each element apart."""
        largest = max((float(grad.abs().max()) for grad in gradients.values()), default=0.0)
        moved = [_moved(run, step) for run in self._runs]
        for name, grad in gradients.items():
            squares = self._squares[name] = self._squares.get(name, 0) + grad**2
            rounding = self._within * max(float(grad.abs().max()), _NEGLIGIBLE * largest)
            # 4: an error counts in Adam's numerator and in its denominator, and single elements have twice the ordinary one.
            share = (4 * rounding / (squares / (step + 1)).sqrt()).nan_to_num(2).clamp(max=2)
            self.at[name] = self.at.get(name, 0) + max(each.get(name, 0.0) for each in moved) * share


def _difference(mine: Any, other: Any, allowed: Any, floor: float, step: int) -> str:
    """How a parameter differs; "" if it does not. allowed: by element. floor: relative, always allowed."""
    if mine is None or other is None:
        return f"is only in the {'new' if mine is None else 'old'} model"
    if mine.shape != other.shape:
        return f"has shape {tuple(mine.shape)}, and {tuple(other.shape)} in the new script"
    if not mine.numel():
        return ""
    import torch

    difference = (mine.double() - other.double()).abs()
    largest = max(float(mine.double().abs().max()), 1e-2)
    kept = max(torch.finfo(each.dtype).eps if each.is_floating_point() else 0.0 for each in (mine, other))
    excess = difference - allowed - largest * (floor + (step + 1) * kept)
    worst = int(excess.argmax())
    if float(excess.flatten()[worst]) <= 0:
        return ""
    return f"differs by up to {float(difference.max()):.3g}, at element {worst} ({float(mine.flatten()[worst]):.8g})"


def _moved(run: Run, step: int) -> dict[str, float]:
    """The largest change of an element of each parameter in a step; of the first one, before which nothing was written, in the next."""
    step = max(step, 1)
    if step >= run.num_steps:
        return {}
    before, after = run.tensors(step - 1, "params"), run.tensors(step, "params")
    both = [name for name in after if name in before and before[name].shape == after[name].shape and after[name].numel()]
    return {name: float((after[name].double() - before[name].double()).abs().max()) for name in both}
