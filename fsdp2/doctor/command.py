"""``fsdp2 doctor train.py -- args``: a script's first steps on CPU ranks of this machine, with every check on.

    fsdp2 doctor --ranks 2 --steps 3 train.py -- --config tiny.toml
    fsdp2 doctor -m recipes.train -- --config tiny.toml

The script runs as under torchrun, on forks of this process; ``patient.py`` is what each rank runs. Its devices are hidden: it must be
able to train on the CPU. What it prints goes to standard error. However the ranks end, this process reads their records and says what
they have found, or why they could not look.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from ..arguments import add_format
from ..hangs.background import EXIT_STATUS
from ..printable import of_ranks, say, say_json
from ..ranks import OVER, Ranks, run_ranks
from ..run import add_cpu_run, add_script, checked_script, run_script
from .finding import Finding
from .patient import examine
from .rank_record import RankRecord, fault_file, read_records, report_of_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cpu_run(parser, ranks=2, steps=3, timeout=60.0)
    parser.add_argument("--strict", action="store_true", help="exit status 1 if there is a finding")
    add_format(parser)
    add_script(parser)


def run(options: argparse.Namespace) -> int:
    """The exit status.

    1 where the script fails, where the doctor could not look, or with ``--strict`` and findings; 128 + n if signal n ended it; else 0.
    """
    arguments = checked_script("doctor", options)
    script = partial(run_script, options.script, arguments, options.is_module)
    with tempfile.TemporaryDirectory() as folder, _terminated_as_error():
        ranks = run_ranks(
            options.ranks,
            lambda rank: examine(script, options.steps, folder, options.timeout),
            limit_s=options.limit,
            grace_s=1.0,
            stops_on=(KeyboardInterrupt, _StoppedError),
            output=sys.stderr,
        )
        status = _status_of(ranks)
        for end in ranks:
            fault_file(folder, end.rank).write_text(end.stack)
        records = read_records(folder, options.ranks)
    num_findings = _say(records, ranks, options.script, status, options.format == "json")
    has_looked = any(record.has_looked for record in records)
    return status or int(not has_looked or (options.strict and num_findings > 0))


class _StoppedError(Exception):
    """Somebody has told this process to end."""


def _status_of(ranks: Ranks) -> int:
    if ranks.stopped_by is not None:
        return 128 + (signal.SIGINT if isinstance(ranks.stopped_by, KeyboardInterrupt) else signal.SIGTERM)
    return OVER if ranks.is_late else int(ranks.first_failed is not None)


@contextlib.contextmanager
def _terminated_as_error() -> Iterator[None]:
    """Inside, the first SIGTERM raises, and others do nothing: ``timeout`` sends one to the process, and one to its group."""

    def stop(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _StoppedError

    usual = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _say(records: Sequence[RankRecord], ranks: Ranks, script: str, status: int, as_json: bool) -> int:
    """Print what ``records`` have, or why they have nothing. Returns the number of findings."""
    report = report_of_records(records, list(_apart(records, status)))
    num_steps = max((record.num_steps for record in records), default=0)
    has_looked = bool(report) or any(record.has_looked for record in records)
    ends = list(_ends(records, ranks))
    if as_json:
        ends += [] if has_looked else [_why_nothing(records)]
        seen = {"script": script, "steps": num_steps, "has_looked": has_looked, "status": status, "ends": ends}
        say_json({**seen, "findings": list(report)})
        return len(report)
    say(f"\nfsdp2 doctor: {num_steps} steps of {script}")
    for line in ends:
        say(line)
    if has_looked:
        report.show()
    else:
        say(f"{_why_nothing(records)}: nothing was looked at")
    sys.stdout.flush()
    return len(report)


def _apart(records: Sequence[RankRecord], status: int) -> Iterator[Finding]:
    """Ranks that waited for each other, or that a backend ended, because they had called different collectives."""
    failures = [record.failure for record in records if record.failure]
    by_backend = all(any(word in failure for word in ("gloo", "LostRankError", "Connection closed")) for failure in failures)
    places = {record.rank: record.place for record in records}
    if status and by_backend and len(places) > 1 and all(places.values()):
        yield Finding(
            "ranks-apart",
            "error",
            "ranks waited for each other, or a collective failed: "
            + ", ".join(f"rank {rank} was at {place}" for rank, place in list(places.items())[:8]),
            "ranks that call different collectives, or one of them more often, hang or end without an error of Python",
            "call forward, backward, clipping, optimizer.step() and saving on all ranks, outside of `if rank == 0:`; a watchdog's "
            "lines above say more",
            ranks=tuple(places),
        )


def _ends(records: Sequence[RankRecord], ranks: Ranks) -> Iterator[str]:
    """How the script has ended, if not well: the first failure, as others follow from it."""
    failed = sorted((record for record in records if record.has_failed), key=lambda record: record.ended_s)
    if failed:
        first = failed[0]
        same = tuple(sorted(record.rank for record in failed if (record.failure, record.status) == (first.failure, first.status)))
        if first.status == EXIT_STATUS:
            yield "the ranks waited for each other, and a watchdog ended the script"
            return
        how = (
            f"failed on {of_ranks(same)}: {first.failure}" if first.failure else f"ended on {of_ranks(same)} with status {first.status}"
        )
        yield f"the script {how}"
        if any(word in first.failure.lower() for word in ("cuda", "nccl", "gpu")):
            yield "the doctor hides devices: the script must train on the CPU, with gloo, where torch.cuda.is_available() is False"
    elif ranks.is_late:
        yield "the script has taken longer than --limit, and was stopped"
    elif ranks.stopped_by is not None:
        yield f"the script was stopped by {signal.Signals(_status_of(ranks) - 128).name}"
    elif lost := ranks.first_failed:
        yield f"a signal, or code other than Python's, ended the script on rank {lost.rank} with status {lost.status}"


def _why_nothing(records: Sequence[RankRecord]) -> str:
    if not records:
        return "no rank has begun to run the script"
    if any(record.has_forward for record in records):
        return "a sharded model has run forward, but no torch.optim.Optimizer that has its parameters has stepped"
    if any(record.has_stepped_another for record in records):
        return "an optimizer has stepped, but none of its parameters are sharded by fully_shard or fsdp2.parallelize"
    return (
        "no optimizer has stepped on a model that fully_shard was called on, in the processes that the doctor has started "
        "(a script that starts processes of its own has to leave that to the doctor)"
    )
