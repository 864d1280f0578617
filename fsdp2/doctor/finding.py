"""The doctor's findings as plain data, and a report of them as text.

[warning] optimizer-misses-parameters (ranks 0, 1): the optimizer does not have 2 trainable parameters
    head.weight, head.bias
    why: no step ever changes them
    fix: build the optimizer from model.parameters(), after fully_shard
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import MAX_ITEMS, DoctorError
from ..printable import of_ranks, printable
from ..tables import Shown

Severity = Literal["error", "warning", "note"]
_ORDER = ("error", "warning", "note")
_COLORS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    check:    the name of the check that found it, by which ``ignore`` leaves it out and docs/doctor.md explains it
    severity: "error": results are wrong, or the program will fail; "warning": results may be wrong; "note": it costs time or memory
    what:     the fault
    why:      why that matters
    fix:      what to do
    params:   names of parameters, buffers or modules from the root; empty if it is about none
    ranks:    the ranks on which it was found; empty: this one, if ranks have not compared
    """

    check: str
    severity: Severity
    what: str
    why: str
    fix: str
    params: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def of(self, params: Iterable[str]) -> Finding:
        """The same fault of these parameters, whose number is ``{count}`` in ``what``."""
        names = tuple(params)
        return replace(self, what=self.what.format(count=len(names)), params=names)

    def on(self, ranks: tuple[int, ...]) -> Finding:
        """The same fault on these ranks, whose number is ``{count}`` in ``what``."""
        return replace(self, what=self.what.format(count=len(ranks)), ranks=ranks)

    def __str__(self) -> str:
        listed = list(self.params[:MAX_ITEMS])
        if len(self.params) > MAX_ITEMS:
            listed.append(f"and {len(self.params) - MAX_ITEMS} more")
        where = f" ({of_ranks(self.ranks)})" if self.ranks else ""
        lines = [f"[{self.severity}] {self.check}{where}: {self.what}"]
        lines += [f"    {', '.join(listed)}"] if listed else []
        return printable("\n".join([*lines, f"    why: {self.why}", f"    fix: {self.fix}"]))


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown, Sequence[Finding]):
    """Findings, the gravest first; false if there is none. ``print`` it, or ``show`` it in color."""

    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings) or "the doctor found nothing"

    def show(self, file: Any = None) -> None:
        """Print it; in color on a terminal, if rich is installed."""
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            (file or sys.stdout).write(f"{self}\n")
            return
        console = Console(file=file, soft_wrap=True)
        for finding in self.findings:
            text = Text(str(finding))
            text.stylize(_COLORS[finding.severity], 0, len(finding.severity) + 2)
            console.print(text)
        if not self.findings:
            console.print(str(self))

    def raise_if_any(self) -> None:
        """Raise DoctorError with all of them, if there are any."""
        if self.findings:
            raise DoctorError(f"the doctor has {len(self.findings)} findings\n{self}")


def report_of(by_rank: Sequence[Iterable[Finding]], ignore: Iterable[str] = ()) -> Report:
    """Join what each rank found: equal findings become one, with the ranks that have it.

    by_rank: in the order of ranks; findings that already name ranks are the same on all
    ignore:  names of checks that are left out
    """
    left_out = set(ignore)
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in dict.fromkeys(findings):
            if finding.check not in left_out:
                ranks.setdefault(finding, []).append(rank)
    joined = [finding if finding.ranks else replace(finding, ranks=tuple(found)) for finding, found in ranks.items()]
    return Report(tuple(sorted(joined, key=lambda finding: _ORDER.index(finding.severity))))
