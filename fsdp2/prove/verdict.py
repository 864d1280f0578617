"""A verdict: statements, each with the way by which it was obtained, as text for people and as JSON for programs (docs/prove.md).

fsdp2 prove: a fault in train.py (4 steps on 2 ranks, torch's FSDP2)
[fault] gradients, step 1 on rank 0 (measured): head.weight is 2 times the reference's
[ok]    losses (measured): 8 losses are the reference's, the worst at 3% of what rounding may change
[ -- ]  orders: not looked at: the script cannot run on the device
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..printable import counted, of_ranks

SCHEMA = "fsdp2.prove/1"
Method = Literal["measured", "measured on a stand-in", "modeled", "not looked at"]
MAX_FAULTS = 6
MAX_SAID = 300
"""Characters of a statement on a screen."""
COMPARED = ("losses", "gradients", "parameters")
"""Subjects that are compared with the reference: without any of them nothing is proven."""


@dataclass(frozen=True)
class Statement:
    """What is said of one subject.

    holds:  True: as it should be; False: a fault; None: it was not looked at, or it is no fault
    said:   the statement; of what was not looked at, why
    check:  the doctor's name for it, if it is the doctor's
    """

    subject: str
    holds: bool | None
    method: Method
    said: str
    fix: str = ""
    check: str = ""
    step: int | None = None
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        mark = {True: "[ok]   ", False: "[fault]", None: "[ -- ] "}[self.holds]
        at = ", ".join(filter(None, [f"step {self.step}" if self.step else "", of_ranks(self.ranks) if self.ranks else ""]))
        where = f", {at}" if at and self.holds is False else ""
        said = self.said if len(self.said) <= MAX_SAID else f"{self.said[:MAX_SAID]} ... (all of it is in the JSON)"
        lines = [f"{mark} {self.subject}{where}{'' if self.method == 'not looked at' else f' ({self.method})'}: {said}"]
        if self.names and self.holds is False:
            more = f" and {len(self.names) - 4} more" if len(self.names) > 4 else ""
            lines.append(f"        {', '.join(self.names[:4])}{more}")
        return "\n".join([*lines, *([f"        fix: {self.fix}"] if self.fix else [])])


def not_looked_at(subject: str, why: str) -> Statement:
    return Statement(subject, None, "not looked at", why)


@dataclass
class Verdict:
    """verdict: "proven": as far as it looked; "fault"; "not run". seconds: of each run"""

    script: str
    ranks: int
    steps: int = 0
    implementation: str = ""
    verdict: Literal["proven", "fault", "not run"] = "not run"
    statements: list[Statement] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    why_not_run: str = ""

    @property
    def faults(self) -> list[Statement]:
        return [each for each in self.statements if each.holds is False]

    @property
    def status(self) -> int:
        return {"proven": 0, "fault": 1, "not run": 2}[self.verdict]

    def decide(self) -> None:
        """Set ``verdict`` from the statements."""
        compared = [each for each in self.statements if each.subject in COMPARED]
        if not any(each.holds is not None for each in compared) and not self.why_not_run:
            self.why_not_run = f"nothing was compared with the reference: {compared[0].said if compared else 'no step'}"
        self.verdict = "fault" if self.faults else "not run" if self.why_not_run else "proven"

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in self.__dataclass_fields__}, "faults": self.faults}

    def __str__(self) -> str:
        """One screen, the first fault first."""
        head = {"proven": "as far as it looked, nothing is wrong in", "fault": "a fault in", "not run": "could not judge"}[self.verdict]
        whose = f", {self.implementation}" if self.implementation else ""
        lines = [f"fsdp2 prove: {head} {self.script} ({counted(self.steps, 'step')} on {counted(self.ranks, 'rank')}{whose})"]
        lines += [self.why_not_run] if self.why_not_run else []
        lines += map(str, self.faults[:MAX_FAULTS])
        if len(self.faults) > MAX_FAULTS:
            lines.append(f"and {len(self.faults) - MAX_FAULTS} more faults, in the JSON")
        lines += [str(replace(each, fix="")) for each in self.statements if each.holds]
        others = [each for each in self.statements if each.holds is None]
        for said in dict.fromkeys(each.said for each in others):
            same = [each for each in others if each.said == said]
            lines.append(str(replace(same[0], fix="", subject=", ".join(each.subject for each in same))))
        lines.append(f"time: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in self.seconds.items())}")
        return "\n".join(lines)


__all__ = ["SCHEMA", "Method", "Statement", "Verdict", "not_looked_at"]
