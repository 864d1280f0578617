"""Where two recorded runs first differ: step, phase, unit and parameter, and whether by rounding. Pure.

Gathered parameters are compared rank by rank, since each rank has a copy of its own; gradients and updated parameters as whole tensors,
summed up over the ranks that have a part of one copy. A rank, or a copy, that one run lacks is compared with its first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .fingerprint import NOTHING, Fingerprint
from .run_folder import Values

PHASES = ("parameters", "gradients", "update")
"""The phases in the order of a step; the record has the order of units within one."""

Lines = Mapping[int, Sequence[Values]]
"""The lines of one run, by rank."""


@dataclass(frozen=True)
class Difference:
    """distance: about the norm of the difference; others: parameters that differ in the same phase of the same step

    who:     "rank 1" of gathered parameters, "replica 1" of the others; "" if there is only one
    why:     what the recordings say of the cause; "" if nothing
    only_in: "first" or "second" if the other run has not recorded it, such as gradients that an optimizer takes in backward
    """

    step: int
    phase: str
    unit: str
    param: str
    who: str
    distance: float
    norm: float
    is_rounding: bool
    others: int
    only_in: str = ""
    why: str = ""

    def __str__(self) -> str:
        what = {"parameters": "gathered parameters", "gradients": "reduced gradients", "update": "updated parameters"}[self.phase]
        how = "by rounding" if self.is_rounding else "by more than rounding"
        where = f" on {self.who}" if self.who else ""
        more = f"; {self.others} more parameters differ in that phase" if self.others else ""
        if self.only_in:
            other = "second" if self.only_in == "first" else "first"
            why = (
                f"in the {other} run it had no gradient after backward, because the optimizer takes gradients in backward, or because "
                "forward did not use it"
                if self.phase == "gradients"
                else f"the {other} run has no such parameter there"
            )
            return (
                f"step {self.step}, {what} of {self.unit}{where}: {self.param} was recorded in the {self.only_in} run only: {why}{more}"
            )
        return (
            f"step {self.step}, {what} of {self.unit}{where}: {self.param} differs {how}, "
            f"by about {self.distance:.3g} at a norm of {self.norm:.3g}{more}{self.why and ': ' + self.why}"
        )


def differences(first: Lines, second: Lines) -> Iterator[Difference]:
    """In order, for each phase of each step of both runs: the first parameter that differs, and the first by more than rounding.

    A parameter that one run lacks differs by more.
    """
    by_step = [{step: _at(lines, step) for step in _steps(lines)} for lines in (first, second)]
    for step in sorted(by_step[0].keys() & by_step[1].keys()):
        for phase in PHASES:
            found = list(_of_phase(step, phase, by_step[0][step], by_step[1][step]))
            if found:
                others = len({each.param for each in found}) - 1
                by_more = next((each for each in found if not each.is_rounding), found[0])
                for each in dict.fromkeys([found[0], by_more]):
                    yield replace(each, others=others)


def common_steps(first: Lines, second: Lines) -> list[int]:
    return sorted(_steps(first) & _steps(second))


def _steps(lines: Lines) -> set[int]:
    """The steps that all ranks have."""
    return set.intersection(*({line["step"] for line in each} for each in lines.values())) if lines else set()


def _at(lines: Lines, step: int) -> dict[int, Values]:
    return {rank: next(line for line in each if line["step"] == step) for rank, each in lines.items()}


@dataclass(frozen=True)
class _Whole:
    made: Fingerprint
    eps: float
    dtypes: str = ""


def _wholes(phase: str, by_rank: Mapping[int, Values]) -> dict[tuple[str, str], dict[int, _Whole]]:
    """The values by (unit, parameter) in the order of the lowest rank, and by rank or replica."""
    found: dict[tuple[str, str], dict[int, _Whole]] = {}
    for rank, line in sorted(by_rank.items()):
        for unit, params in line[phase].items():
            for param, said in params.items():
                who = rank if phase == "parameters" else said["replica"]
                copies = found.setdefault((unit, param), {})
                before = copies.get(who, _Whole(NOTHING, 0.0))
                made = Fingerprint(said["checksum"], said["squares"], tuple(said["sketch"]))
                copies[who] = _Whole(before.made + made, max(before.eps, said["eps"]), said.get("dtypes", ""))
    return found


def _of_phase(step: int, phase: str, first: Mapping[int, Values], second: Mapping[int, Values]) -> Iterator[Difference]:
    ours, theirs = _wholes(phase, first), _wholes(phase, second)
    kind = "rank" if phase == "parameters" else "replica"
    for unit, param in dict.fromkeys([*ours, *theirs]):
        pair = ours.get((unit, param), {}), theirs.get((unit, param), {})
        several = max(map(len, pair)) > 1
        for who in sorted({*pair[0], *pair[1]}):
            one, other = (copies.get(who, copies.get(min(copies))) if copies else None for copies in pair)
            if one is None or other is None:
                has = one or other
                assert has is not None
                norm, only_in = has.made.norm, "second" if one is None else "first"
                yield Difference(step, phase, unit, param, f"{kind} {who}" if several else "", norm, norm, False, 0, only_in)
            elif one.made.checksum != other.made.checksum:
                distance, norm = one.made.distance(other.made), max(one.made.norm, other.made.norm)
                is_rounding = distance <= limit(max(one.eps, other.eps)) * norm
                whose = f"{kind} {who}" if several else ""
                why = _why(phase, one, other, is_rounding)
                yield Difference(step, phase, unit, param, whose, distance, norm, is_rounding, 0, why=why)


def _why(phase: str, first: _Whole, second: _Whole, is_rounding: bool) -> str:
    if first.dtypes != second.dtypes and first.dtypes and second.dtypes:
        said = ["{} computed in {}, reduced in {}".format(*each.dtypes.split()) for each in (first, second)]
        return f"the first run has {said[0]}; the second {said[1]}"
    times = second.made.norm / first.made.norm if first.made.squares else 0.0
    away = math.dist([times * each for each in first.made.sketch], second.made.sketch) / math.sqrt(len(first.made.sketch))
    if phase == "gradients" and times and not is_rounding and away <= limit(max(first.eps, second.eps)) * second.made.norm:
        return f"the second run's is {times:.4g} times the first's, so the runs divide by different numbers"
    return ""


def limit(eps: float) -> float:
    """The share of its norm by which rounding may change a tensor: 64 units of fp32, which sums collect; 4 of a coarser dtype."""
    return 64 * eps if eps < 1e-4 else 4 * eps
