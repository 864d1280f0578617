"""What ``--parity`` counts as a difference between two runs: losses, gradients and parameters in each step; it reports the first.

Rounding may differ, and by how much depends on the arithmetic: 1e-4 where both runs compute in fp32, 2e-2 where both do in bf16 or
fp16. Parameters need more than that: Adam divides a gradient by its own size, and so moves an element whose gradient is nothing but
rounding by a whole learning rate, in a direction of its own in each run. How far two right runs part at an element is therefore
measured in what a step moves its parameter:

    lr 0.1, gradients of one tensor    1.0       0.02      1e-6, of which all is rounding
    may part, in bf16, a step          0.008     0.2       0.2, twice the learning rate
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
        """Whether something in it was computed in bf16 or fp16."""
        return any(step.get("narrow") for step in self.ranks[0])


def first_difference(old: Run, new: Run, tolerance: float | None) -> str:
    """The first place where two runs differ by more than ``tolerance``, relative; "" if there is none.

    tolerance: None: what the arithmetic of both runs explains
    """
    within = tolerance or (_NARROW_TOLERANCE if old.is_narrow and new.is_narrow else _TOLERANCE)
    apart = _Apart(old, new, within, tolerance or _TOLERANCE)
    for step in range(min(old.num_steps, new.num_steps)):
        place = f"step {step + 1}"
        for rank, (before, after) in enumerate(zip(old.ranks, new.ranks, strict=True)):
            losses, others = before[step]["losses"], after[step]["losses"]
            if len(losses) != len(others):
                return f"{place}, rank {rank}: {len(losses)} backward passes, and {len(others)} in the new script"
            for index, (mine, other) in enumerate(zip(losses, others, strict=True)):
                if not _close(mine, other, within):
                    return f"{place}, rank {rank}: loss {index + 1} is {mine:.8g}, and {other:.8g} in the new script"
        norm, other_norm = old.ranks[0][step]["norm"], new.ranks[0][step]["norm"]
        if not _close(norm, other_norm, within):
            return f"{place}: the gradient norm is {norm:.8g}, and {other_norm:.8g} in the new script"
        for found in apart.gradients(step):
            return f"{place}: the gradient of {found}"
        for found in apart.parameters(step):
            return f"after {place}: parameter {found}"
    if old.num_steps != new.num_steps:
        return f"the old script took {old.num_steps} steps, the new one {new.num_steps}: {_last_error(old) or _last_error(new)}"
    return ""


def _last_error(run: Run) -> str:
    return next((line.strip() for line in run.said.splitlines() if "Error:" in line), "")


def _close(mine: float, other: float, tolerance: float) -> bool:
    if math.isnan(mine) or math.isnan(other):
        return math.isnan(mine) and math.isnan(other)
    return mine == other or abs(mine - other) <= tolerance * max(abs(mine), abs(other), 1e-6)


class _Apart:
    """Gradients and parameters of two runs, which are asked for step by step.

    within:  relative, of gradients
    floor:   relative, of parameters: always allowed
    squares: of the gradients so far, summed; allowed: how far two right runs may be apart by now. Both by parameter and element.
    """

    def __init__(self, old: Run, new: Run, within: float, floor: float) -> None:
        self._old, self._new, self._within, self._floor = old, new, within, floor
        self._squares: dict[str, Any] = {}
        self._allowed: dict[str, Any] = {}

    def gradients(self, step: int) -> Iterator[str]:
        """The gradients that differ. FSDP1 shows only their norm; then only the new run's are known."""
        old, new = (_written(run, step, "gradients") for run in (self._old, self._new))
        known = {name: grad.double() for name, grad in {**old, **new}.items()}
        norm = math.sqrt(sum(float(grad.norm()) ** 2 for grad in known.values()))
        for name in old:
            if name in new and old[name].shape == new[name].shape:
                size, difference = float(old[name].double().norm()), float((old[name].double() - new[name].double()).norm())
                if difference > self._within * max(size, _NEGLIGIBLE * norm):
                    yield f"{name} differs by {difference:.3g}, and its norm is {size:.3g}"
        self._follow(step, known)

    def _follow(self, step: int, gradients: dict[str, Any]) -> None:
        """Add up how far this step may take each element apart."""
        largest = max((float(grad.abs().max()) for grad in gradients.values() if grad.numel()), default=0.0)
        moved = [_moved(run, step) for run in (self._old, self._new)]
        for name, grad in gradients.items():
            if not grad.numel():
                continue
            squares = self._squares[name] = self._squares.get(name, 0) + grad**2
            rounding = self._within * max(float(grad.abs().max()), _NEGLIGIBLE * largest)
            # 4: an error counts in Adam's numerator and in its denominator, and single elements have twice the ordinary one.
            share = (4 * rounding / (squares / (step + 1)).sqrt()).nan_to_num(2).clamp(max=2)
            self._allowed[name] = self._allowed.get(name, 0) + max(each.get(name, 0.0) for each in moved) * share

    def parameters(self, step: int) -> Iterator[str]:
        old, new = (_written(run, step, "params") for run in (self._old, self._new))
        for name in {**old, **new}:
            found = self._difference(name, old.get(name), new.get(name), step)
            if found:
                yield f"{name}: {found}"

    def _difference(self, name: str, mine: Any, other: Any, step: int) -> str:
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
        excess = difference - self._allowed.get(name, 0) - largest * (self._floor + (step + 1) * kept)
        worst = int(excess.argmax())
        if float(excess.flatten()[worst]) <= 0:
            return ""
        return f"differs by up to {float(difference.max()):.3g}, at element {worst} ({float(mine.flatten()[worst]):.8g})"


def _written(run: Run, step: int, what: str) -> dict[str, Any]:
    import torch

    values: dict[str, Any] = torch.load(run.folder / f"step{step + 1}.pt", weights_only=True)[what]
    return values


def _moved(run: Run, step: int) -> dict[str, float]:
    """The largest change of an element of each parameter in a step; of the first one, before which nothing was written, in the next."""
    step = max(step, 1)
    if step >= run.num_steps:
        return {}
    before, after = _written(run, step - 1, "params"), _written(run, step, "params")
    both = [name for name in after if name in before and before[name].shape == after[name].shape and after[name].numel()]
    return {name: float((after[name].double() - before[name].double()).abs().max()) for name in both}
