"""Sentences that tell where each rank is, made of the reports of all ranks. Pure: a test makes reports and reads sentences.

It looks first for the causes: ranks that did not answer; a collective for which ranks have sent different things, at the first number
where they differ; ranks that wait in a collective that others have not entered, and where those are instead; calls that all ranks
must make and that only some have made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ..inspect import Record, Stage
from ..printable import alike, of_ranks
from .report import Report


def explain(
    reports: Mapping[int, Report],
    world_size: int,
    silent: Mapping[int, float | None],
    left: Mapping[int, str] | None = None,
    gone: Mapping[int, str] | None = None,
) -> str:
    """reports: of the ranks that answered. silent: for each other rank, seconds since its last sign; None: it gave none.

    left: ranks that have stopped to watch, and why: "" for ranks that have come to the end
    gone: why ranks do not answer, as far as that is known: "its process (24000 on node7) is stopped"
    """
    left, gone = left or {}, gone or {}
    absent = [rank for rank in range(world_size) if rank not in reports]
    lines = [
        f"rank {rank} has left the watchdog{left[rank]}" if rank in left else _silence(rank, silent.get(rank), gone.get(rank))
        for rank in absent
    ]
    mismatches = _mismatches(reports)
    lines += mismatches.values()
    lines += _waits(reports, mismatches)
    lines += _missing_calls(reports)
    if not lines:
        places = {rank: _place(report) for rank, report in reports.items()}
        lines = [f"{_waiting(ranks)} in no collective of fsdp2, {place}" for place, ranks in alike(places)]
    stacks = {rank: report.stacks for rank, report in reports.items()}
    where = {rank: f"{report.host}, pid {report.pid}" for rank, report in reports.items()}
    for stack, ranks in alike(stacks):
        lines.append(f"--- Python stacks of {of_ranks(ranks)} ({'; '.join(where[rank] for rank in ranks[:4])})\n{stack}")
    return "\n".join(lines)


def own_account(report: Report) -> str:
    """Where one rank is, by its own report, and its last collectives, any of which may have failed."""
    said = [f"{_name(item, full=True)} (step {item.step}, #{item.number})" for item in report.items[-3:]]
    return f"{_place(report)}; its last collectives are {'; '.join(said) or 'none'}"


def _silence(rank: int, seconds: float | None, why: str | None) -> str:
    since = "it has never given a sign" if seconds is None else f"its last sign was {seconds:.0f} s ago"
    return f"rank {rank} does not answer ({since}): {why or 'its process is gone, or stopped'}"


def _groups(reports: Mapping[int, Report]) -> dict[str, tuple[int, ...]]:
    return {name: ranks for report in reports.values() for name, ranks in report.ranks.items()}


def _by_number(reports: Mapping[int, Report], group: str) -> dict[int, dict[int, Record]]:
    """Records of a process group, by number and rank."""
    found: dict[int, dict[int, Record]] = {}
    for rank, report in reports.items():
        for item in report.items:
            if item.group == group:
                found.setdefault(item.number, {})[rank] = item
    return found


def _mismatches(reports: Mapping[int, Report]) -> dict[str, str]:
    """For each process group whose ranks have sent different things: a line on the first collective for which they have."""
    lines = {}
    for group in _groups(reports):
        for number, items in sorted(_by_number(reports, group).items()):
            sent = {rank: item.sent for rank, item in items.items()}
            groups = alike(sent)
            if len(groups) > 1:
                said = "; ".join(f"{of_ranks(ranks)} {_name(items[ranks[0]], full=True)}" for _, ranks in groups)
                lines[group] = f"ranks have not issued the same collective #{number}: {said}"
                break
    return lines


def _waits(reports: Mapping[int, Report], parted: Collection[str]) -> list[str]:
    """Which ranks wait in which collective, and where the ranks are that have not entered it.

    parted: groups whose ranks wait because they have sent different things; for these the network is not at fault
    """
    lines = []
    for group, members in _groups(reports).items():
        waiting: dict[int, Record] = {}
        last: dict[int, Record] = {}
        for rank, report in reports.items():
            own = [item for item in report.items if item.group == group]
            if own:
                last[rank] = own[-1]
            waited_for = [item for item in own if item.is_waited_for]
            if waited_for:
                waiting[rank] = waited_for[0]
        for number in sorted({item.number for item in waiting.values()}):
            there = [rank for rank, item in waiting.items() if item.number == number]
            item = waiting[there[0]]
            names = {rank: f"{_name(waiting[rank])} (step {waiting[rank].step}, #{number})" for rank in there}
            lines += [f"{_waiting(ranks)} in {name}" for name, ranks in alike(names)]
            absent = [rank for rank in members if rank in reports and (rank not in last or last[rank].number < number)]
            places = {rank: _absence(reports[rank], item) for rank in absent}
            lines += [f"  {of_ranks(ranks)} {said}" for said, ranks in alike(places)]
            if group not in parted and not absent and set(members) <= set(reports) and len(there) == len(members):
                lines.append("  all of its ranks are in it: the network, the backend or the device does not go on")
    return lines


def _missing_calls(reports: Mapping[int, Report]) -> Iterator[str]:
    """Calls that all ranks, or all of a mesh, must make, in which some ranks wait, and which others have made less often."""
    for name in dict.fromkeys(report.call for report in reports.values() if report.call):
        there = [rank for rank, report in sorted(reports.items()) if report.call == name]
        number = max(reports[rank].calls.get(name, 0) for rank in there)
        of_all = any(not reports[rank].of_call for rank in there)
        expected = set(reports) if of_all else {each for rank in there for each in reports[rank].of_call}
        absent = [rank for rank, report in sorted(reports.items()) if rank in expected and report.calls.get(name, 0) < number]
        if absent:
            yield (
                f"{_waiting(there)} in {name}, call {number}, which all {'' if of_all else 'its '}ranks must make: {of_ranks(absent)} "
                f"{'has' if len(absent) == 1 else 'have'} not made it; call it outside of `if rank == 0:`"
            )


def _absence(report: Report, item: Record) -> str:
    """Where a rank is that has not entered the collective ``item``."""
    entered = (item.phase, item.unit) in report.entered
    never = f"never entered {item.phase} of {item.unit}" if item.unit and not entered else "has not entered it"
    finished = [each for each in report.items if each.stage is Stage.DONE and each.group == item.group]
    last = f"last finished {_name(finished[-1])} (step {finished[-1].step}, #{finished[-1].number})" if finished else "finished none"
    return f"{never}: {_place(report)}; {last}"


def _place(report: Report) -> str:
    phase, unit = report.place
    failed_phase, failed_unit = report.failed
    if failed_phase:
        return f"failed in {failed_phase} of {failed_unit}"
    return f"in {phase} of {unit}" if phase else "outside of forward and backward"


def _name(item: Record, full: bool = False) -> str:
    unit = f" of {item.unit} in {item.phase}" if item.unit else ""
    return f"{item.kind}{unit}" + (f", {item.numel} x {item.dtype}" if full else "")


def _waiting(ranks: Sequence[int]) -> str:
    """ "rank 3 waits", "ranks 0-2, 5 wait" """
    return f"{of_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
