"""The result of a migration: new text, and findings with their lines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Kind(Enum):
    """How much of the reader's attention a finding needs."""

    CHANGED = "changed"  # rewritten; a comment names any difference
    COMPAT = "compat"  # works, under FSDP1's names, on fsdp2.compat
    LEFT = "left"  # as it was; someone has to rewrite it


@dataclass(frozen=True)
class Finding:
    """One line of the listing. ``line`` counts from 1, in the old text."""

    line: int
    kind: Kind
    text: str

    def __lt__(self, other: Finding) -> bool:
        return (self.line, self.text) < (other.line, other.text)

    def shown(self, path: Path | str) -> str:
        return f"{path}:{self.line}: {self.kind.value}: {self.text}"


@dataclass(frozen=True)
class Migrated:
    """The result for one file; ``new == old`` if there was nothing to do.

    on_compat: all of FSDP1 in it is imported from ``fsdp2.compat`` now
    """

    old: str
    new: str
    findings: tuple[Finding, ...] = ()
    on_compat: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, and nothing stays on FSDP1's names."""
        return all(finding.kind is Kind.CHANGED for finding in self.findings)
