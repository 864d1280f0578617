"""``check``: everything that can be seen before training, on all ranks at once.

Each rank looks at what it has; one exchange tells all ranks what all have found, so that every rank has the same report.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..arguments import SWITCH, require
from ..errors import FSDPError
from ..inspect import exchange
from .arguments import checked_ties, ignored_checks
from .dtypes import dtype_findings
from .environment import environment_findings
from .finding import Finding, Report, report_of
from .initialization import initialization_findings
from .inspected import Inspected, inspect
from .optimizers import never_averaged, nothing_trains, optimizer_findings, unseen_writes
from .replicas import Facts, facts_of, replica_findings
from .ties import Ties, tie_findings
from .wrapping import wrapping_findings


def check(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    ties: Ties = (),
    ignore: Iterable[str] = (),
    strict: bool = False,
) -> Report:
    """Look for what makes training wrong in silence, or slow without need: before the first step, or between two.

    model:      the root, sharded
    optimizer:  one, or all that train it
    ties:       names of parameters that should be one, such as ``[("embedding.weight", "head.weight")]``; those that fully_shard saw,
                and those that a model of transformers declares, are known
    ignore:     names of checks whose findings are left out, as docs/doctor.md has them
    strict:     raise where there are findings
    Returns:    the findings of all ranks, the same on every rank
    Collective: yes, over all ranks of the job, one exchange of objects; each rank reads its shards and buffers once
    Raises:     ModuleError if ``model`` is not sharded; ArgumentError for a wrong argument; DoctorError if ``strict``

    Example:
        report = fsdp2.doctor.check(model, optimizer)
        print(report)
    """
    problem: FSDPError | None = None
    found: list[Finding] = []
    facts = Facts((), {}, {}, {}, None)
    ignored = frozenset[str]()
    try:
        require("check", SWITCH, strict=strict)
        ignored = ignored_checks("check", ignore)
        inspected = inspect(model, optimizer, "check")
        found = [*_local_findings(inspected, checked_ties(ties))]
        facts = facts_of(inspected)
    except FSDPError as error:
        problem = error
    said = exchange((found, facts), problem)
    together = list(replica_findings([each for _, each in said])) if len(said) > 1 else []
    report = report_of([[*local, *together] for local, _ in said], ignored)
    if strict:
        report.raise_if_any()
    return report


def check_alone(model: nn.Module) -> list[Finding]:
    """The findings of this rank alone, wherever the other ranks are. Collective: no. Raises: as ``check``"""
    rank = dist.get_rank() if dist.is_initialized() else 0
    inspected = inspect(model, None, "check")
    return [replace(finding, ranks=(rank,)) for finding in (*nothing_trains(inspected), *_local_findings(inspected, ()))]


def _local_findings(inspected: Inspected, ties: Ties) -> Iterable[Finding]:
    yield from initialization_findings(inspected)
    yield from tie_findings(inspected, ties)
    yield from optimizer_findings(inspected)
    yield from never_averaged(inspected)
    yield from unseen_writes(inspected)
    yield from dtype_findings(inspected)
    yield from wrapping_findings(inspected)
    yield from environment_findings(os.environ, inspected.groups[0].device.type if inspected.groups else "cpu")
