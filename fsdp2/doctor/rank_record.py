"""What one rank of ``fsdp2 doctor`` has seen, in a file that outlives the rank.

A script may end by an error, by ``os._exit``, by a signal, or because the launcher ends it after another rank has failed. Each rank
writes its record whenever it learns something, so that the command can say what was found however the ranks have ended.
"""

from __future__ import annotations

import os
import pickle
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .finding import Finding, Report, report_of


@dataclass
class RankRecord:
    """One rank's record.

    findings:             of ``check`` and of the watch
    num_steps:            of the optimizer of sharded parameters that has stepped most
    has_looked:           the doctor has checked a model before an optimizer's step
    has_forward:          a sharded model has begun a forward
    has_stepped_another:  an optimizer without sharded parameters has stepped
    place:                the script's line that the rank was at when it failed, or when it hung
    failure:              the error that the script raised, in one line; empty: none
    status:               with which the script ended; None: it runs, or was ended from outside
    ended_s:              when it ended, of the clock that all ranks share
    """

    rank: int
    findings: dict[Finding, None] = field(default_factory=dict)
    num_steps: int = 0
    has_looked: bool = False
    has_forward: bool = False
    has_stepped_another: bool = False
    place: str = ""
    failure: str = ""
    status: int | None = None
    ended_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        return bool(self.failure) or self.status not in (None, 0)

    def write(self, folder: str) -> None:
        """Replace the last one by it, whole: the rank may be ended at any moment."""
        path = Path(folder, f"rank-{self.rank}")
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(self))
        os.replace(unfinished, path)


def read_records(folder: str, num_ranks: int) -> list[RankRecord]:
    """Those of the ranks that have begun to run the script, by rank."""
    paths = (Path(folder, f"rank-{rank}") for rank in range(num_ranks))
    records: list[RankRecord] = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
    for record in records:
        if not record.place and fault_file(folder, record.rank).exists():
            text = fault_file(folder, record.rank).read_text()
            if "Segmentation fault" not in text:  # which is no collective's
                record.place = place_of([(file, int(line)) for file, line in re.findall(r'File "(.+)", line (\d+)', text)])
    return records


def fault_file(folder: str, rank: int) -> Path:
    """Has the stacks of a rank that a signal has ended, the innermost call first."""
    return Path(folder, f"fault-{rank}")


def place_of(calls: Iterable[tuple[str, int]]) -> str:
    """The line of the script that has made the innermost call: ``train.py:41``; "" if there is none."""
    libraries = (*sysconfig.get_paths().values(), str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")
    return next((f"{Path(file).name}:{line}" for file, line in calls if not file.startswith(libraries)), "")


def report_of_records(records: Iterable[RankRecord], more: Iterable[Finding] = ()) -> Report:
    """The findings of all ranks. Some ranks have learnt in an exchange what another had found; ``ranks`` of each names all."""
    ranks: dict[Finding, set[int]] = {}
    for record in records:
        for finding in record.findings:
            ranks.setdefault(replace(finding, ranks=()), set()).update(finding.ranks or (record.rank,))
    return report_of([[*more, *(replace(finding, ranks=tuple(sorted(found))) for finding, found in ranks.items())]])
