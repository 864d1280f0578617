"""From what the ranks of all runs have written down to statements."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..doctor.finding import Report
from ..doctor.rank_record import RankRecord, place_of, read_records, report_of_records
from ..planner.memory import Peak
from ..printable import alike, counted, in_bytes, of_ranks
from ..ranks import Ranks
from ..state_bytes import StateBytes
from .comparing import Compared, Events, compare, first_differing_call, first_that_ranks_do_not_share, moments_of, wholes
from .verdict import Method, Statement, not_looked_at
from .witness import REFERENCES, read_events

Planned = tuple[StateBytes, Peak]
"""What ``fsdp2 plan`` says of rank 0: the bytes that it keeps, and its peak."""
_SUBJECTS = {"loss": "losses", "gradients": "gradients", "parameters": "parameters", "buffers": "buffers"}


@dataclass
class Run:
    """One run of the program, as its ranks have written it down."""

    role: str
    folder: Path
    ranks: Ranks

    @functools.cached_property
    def records(self) -> list[RankRecord]:
        return read_records(str(self.folder), len(self.ranks))

    @functools.cached_property
    def events(self) -> Events:
        return {rank: read_events(self.folder, rank) for rank in range(len(self.ranks))}

    def all_events(self) -> Iterator[Mapping[str, Any]]:
        return (each for events in self.events.values() for each in events)

    @property
    def is_well(self) -> bool:
        return self.ranks.status == 0

    @property
    def num_steps(self) -> int:
        return max((record.num_steps for record in self.records), default=0)

    def calls(self) -> dict[int, list[str]]:
        """The collectives of each rank, in order."""
        paths = {rank: self.folder / f"calls-{rank}" for rank in range(len(self.ranks))}
        return {rank: path.read_text().splitlines() if path.exists() else [] for rank, path in paths.items()}

    def first_failure(self) -> RankRecord | None:
        failed = [record for record in self.records if record.has_failed]
        # A rank that lost another says so after that one has failed.
        return min(failed, key=lambda record: (_is_of_backend(record.failure), record.ended_s), default=None)

    @property
    def is_refused(self) -> bool:
        """An error of this package has ended it."""
        record = self.first_failure()
        return record is not None and record.failure.startswith("fsdp2.errors.") and not _is_of_backend(record.failure)

    def why(self) -> str:
        """Why it has ended, if not well: a sentence with rank and line."""
        if self.ranks.is_late:
            return self._where_ranks_wait()
        record = self.first_failure()
        if record is not None:
            at = f" at {record.place}" if record.place else ""
            return f"rank {record.rank} failed{at}: {_parts_of(record.failure)[0] or f'status {record.status}'}"
        first = self.ranks.first_failed
        lines = "" if first is None else " ".join(first.output.splitlines()[-2:])
        return "" if first is None else f"rank {first.rank} ended with status {first.status}{self._place(first.rank)}: {lines}"

    def _place(self, rank: int) -> str:
        """The script's line that a rank was at when it was ended."""
        place = place_of([(file, int(line)) for file, line in re.findall(r'File "(.+)", line (\d+)', self.ranks[rank].stack)])
        return f" at {place}" if place else ""

    def _where_ranks_wait(self) -> str:
        told = {}
        for rank, lines in self.calls().items():
            name, *rest = (lines or ["no collective"])[-1].split(" ", 4)
            where = f" in {rest[3]}" if len(rest) > 3 and rest[3] else ""
            told[rank] = f"{self._place(rank)}, after {name}{where}" if self.ranks[rank].status else " at the end"
        how = "the ranks wait for each other" if self.ranks.is_stalled else "the time limit is over"
        by_place = (f"{of_ranks(who)} {'is' if len(who) == 1 else 'are'}{what}" for what, who in alike(told))
        return f"{how}: {'; '.join(by_place)}"


def _parts_of(failure: str) -> tuple[str, str]:
    """Of an error's text, all that has happened, on one line; and the fix."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    said = "; ".join(line for line in lines if not line.startswith(("expected:", "fix:")))
    return said, next((line.removeprefix("fix:").strip() for line in lines if line.startswith("fix:")), "")


def resumed(role: str) -> str:
    """The run like ``role``'s on another number of ranks, which loads a checkpoint."""
    return "resumed" if role == "real" else f"resumed {role}"


def _is_of_backend(failure: str) -> bool:
    return any(word in failure for word in ("gloo", "LostRankError", "Connection closed", "Connection reset"))


def statements_of(runs: Mapping[str, Run], no_device: str, planned: Planned | str | None) -> Iterator[Statement]:
    """Those that follow from these runs, the gravest faults first.

    no_device: why there is no run on the pretend accelerator; planned: or why there is no plan
    """
    real, reference, exact = runs["real"], *(runs.get(role) for role in REFERENCES)
    apart = first_differing_call(real.calls())
    by_backend = (record := real.first_failure()) is None or _is_of_backend(record.failure)
    report = report_of_records(real.records)
    alone, others = (Report(tuple(each for each in report if (each.check == "step-on-some-ranks") is it)) for it in (True, False))
    yield from _of_doctor(alone, ("error", "warning"))  # the ranks that step have ended before the others, which explains the rest
    if apart is not None and (real.is_well or by_backend):  # else a rank has failed by itself
        yield Statement("collectives", False, "measured", apart, "make these calls on all ranks, outside of `if rank == 0:`")
    if not real.is_well:
        ranks = () if record is None or real.ranks.is_late else (record.rank,)
        subject = "hang" if real.ranks.is_late else "run"
        fix = "" if record is None or real.ranks.is_late else _parts_of(record.failure)[1]
        yield Statement(subject, False, "measured", real.why(), fix, step=real.num_steps + 1, ranks=ranks)
    if apart is None:
        most = max(map(len, real.calls().values()), default=0)
        yield Statement("collectives", True, "measured", f"all ranks issued the same collectives in the same order, up to {most} each")
    looked = any(record.has_looked for record in real.records)
    yield from _of_doctor(others, ("error",))
    yield _of_equal_ranks(reference)
    yield from _of_comparison(real, reference, exact)
    yield from _of_doctor(others, ("warning",))
    yield _of_certificate(real)
    yield from _of_device(runs, no_device, planned)
    yield _of_checkpoint(real, *(runs.get(resumed(role)) for role in ("real", *REFERENCES)))
    yield _of_plan(real, planned)
    if not looked and not report:
        yield not_looked_at("doctor", "no optimizer has stepped on a sharded model that the doctor knows")
    elif not any(each.severity != "note" for each in report):
        yield Statement("doctor", True, "measured", f"no finding in {real.num_steps} steps{_notes(report)}")


def _of_certificate(real: Run) -> Statement:
    """Faults are the doctor's: ``gradient-scale`` and ``token-weights``."""
    found = next((each for each in real.events.get(0, ()) if each["kind"] == "divisors"), None)
    if found is None:
        return not_looked_at("divisors", "that takes two steps of a sharded model")
    by_divisor: dict[str, int] = {}
    for divisor in filter(None, found["divisors"].values()):
        by_divisor[f"{divisor:.4g}"] = by_divisor.get(f"{divisor:.4g}", 0) + 1
    if not by_divisor:
        return not_looked_at("divisors", "no backward of the second step gave a parameter of the first sharded model a gradient")
    told = ", ".join(f"{number} by {divisor}" for divisor, number in by_divisor.items())
    known = f"{found['num_tokens']} tokens of all ranks" if found["num_tokens"] else "no loss of torch.nn.functional was heard"
    return Statement("divisors", None if found["is_wrong"] else True, "measured", f"gradients divided: {told} ({known})")


def _notes(report: Report) -> str:
    return "".join(f"; note {each.check}: {each.what}" for each in report)


def _of_doctor(report: Report, severities: tuple[str, ...]) -> Iterator[Statement]:
    for each in report:
        if each.severity in severities:
            said = f"{each.check}: {each.what}; {each.why}"
            yield Statement("doctor", False, "measured", said, each.fix, each.check, names=each.params, ranks=each.ranks)


def _of_device(runs: Mapping[str, Run], no_device: str, planned: Planned | str | None) -> Iterator[Statement]:
    """``orders``, ``capture`` and ``peak``."""
    at_once = runs.get("device")
    if at_once is None or not at_once.is_well:
        why = no_device if at_once is None else f"the program cannot run on the pretend accelerator: {at_once.why()}"
        yield from (not_looked_at(subject, why) for subject in ("orders", "capture"))
        yield (
            not_looked_at("peak", why) if not isinstance(planned, tuple) else Statement("peak", None, "modeled", _of_plans(planned[1]))
        )
        return
    stand_in: Method = "measured on a stand-in"
    orders = [run for role, run in runs.items() if role.startswith("order")]
    fault = next(filter(None, map(functools.partial(_wrong_order, at_once), orders)), None)
    said = f"losses, gradients and parameters have the same bits in {counted(len(orders), 'order')} of streams"
    yield fault or Statement("orders", True, stand_in, said)
    watched = [each for each in at_once.all_events() if each["kind"] == "captured" and (each["problem"] or each["is_compared"])]
    problem = next((each["problem"] for each in watched if each["problem"]), None)
    so_far = "nothing waits for the device, or changes, and all streams are joined at the end"
    said = f"from the first forward to the end of the optimizer's step, {problem or so_far}"
    yield (
        Statement("capture", None if problem else True, stand_in, said)
        if watched
        else not_looked_at("capture", "that takes three steps")
    )
    yield _of_peak(at_once, planned)


def _of_plans(peak: Peak) -> str:
    where = f"{peak.phase} of {peak.where or 'the model'}"
    return f"fsdp2 plan says {in_bytes(peak.nbytes)} for a step of rank 0, in {where}, with a loss of its own"


def _of_peak(at_once: Run, planned: Planned | str | None) -> Statement:
    """Bytes of the device, and what keeps them too long."""
    told = {rank: [each for each in events if each["kind"] == "memory"] for rank, events in at_once.events.items()}
    say = functools.partial(Statement, "peak", False, "measured on a stand-in")
    for rank, (step, each) in ((rank, found) for rank, events in told.items() for found in enumerate(events, 1)):
        if names := tuple(each["unsharded"]):
            fix = "call reshard() on it; fully_shard(..., reshard_after_forward=False) says that it is meant so"
            return say(f"{names[0]} is unsharded still {each['unsharded'][names[0]]}", fix, step=step, names=names, ranks=(rank,))
        if names := tuple(each["twice"]):
            said = f"when the optimizer has stepped, another tensor has the gradient of {names[0]} as well, bit for bit"
            return say(said, "let go of copies of gradients before the step", step=step, names=names, ranks=(rank,))
    for rank, events in told.items():
        kept = [each["kept"] for each in events]
        grown = min((after - before for before, after in itertools.pairwise(kept)), default=0)
        if len(kept) > 2 and grown > max(_FEW_SCALARS, kept[0] / 20):
            said = f"after each step rank {rank} keeps at least {in_bytes(grown)} more than after the one before"
            return say(
                f"{said}: {in_bytes(kept[-1])} at last",
                "keep numbers (loss.item(), or loss.detach()) and no graphs, gradients or activations",
                ranks=(rank,),
            )
    highest = max((each for events in told.values() for each in events), key=lambda each: each["peak"], default=None)
    if highest is None:
        return not_looked_at("peak", "no step was made on the device")
    said = f"a rank needs up to {in_bytes(highest['peak'])}, in {highest['where']} of step {highest['step']}"
    said += f", and keeps {in_bytes(highest['kept'])} after it"
    said += f"; {_of_plans(planned[1])}" if isinstance(planned, tuple) else ""
    return Statement("peak", True, "measured on a stand-in", said)


_FEW_SCALARS = 256
"""Bytes that a program may keep more after each step: losses, say."""


def _of_checkpoint(real: Run, resumed: Run | None, reference: Run | None, exact: Run | None) -> Statement:
    saved = [each for each in real.all_events() if each["kind"] == "saved"]
    failure = next((each["failure"] for each in saved), "")
    if resumed is None or failure:
        return not_looked_at("checkpoint", failure or "that takes as many steps of one optimizer as --steps says")
    loaded = [each for each in resumed.all_events() if each["kind"] == "loaded"]
    on = counted(len(resumed.ranks), "rank")
    if not loaded:
        return not_looked_at("checkpoint", f"the program cannot run on {on}: {resumed.why() or 'it made no step'}")
    said = f"saved on {counted(len(saved), 'rank')} and loaded on {on}, "
    if failure := loaded[0]["failure"]:
        return Statement("checkpoint", False, "measured", said + failure)
    before, after = (wholes(run.events, (first["step"], first["kind"], 0)) for run, first in ((real, saved[0]), (resumed, loaded[0])))
    bits = [{name: {each.made.checksum for each in copies.values()} for name, copies in found.items()} for found in (before, after)]
    found = bits[1].keys() | loaded[0]["numbers"].keys()
    missing = [each for each in (*bits[0], *saved[0]["numbers"]) if each not in found and each.startswith("optimizer ")]
    if missing:  # such a state comes with a parameter's first gradient
        return not_looked_at("checkpoint", f"on {on} the optimizer has no {missing[0].removeprefix('optimizer ')} after a step")
    several = [name for name, each in bits[0].items() if len(each) > 1]
    wrong = tuple(name for name, each in bits[0].items() if name not in several and bits[1].get(name) != each)
    wrong += tuple(name for name, each in saved[0]["numbers"].items() if loaded[0]["numbers"].get(name) != each)
    if wrong:
        return Statement("checkpoint", False, "measured", f"{said}{wrong[0]} is another", step=real.num_steps, names=wrong)
    more = f"; {len(several)} others differ between ranks, such as {several[0]}: it keeps one rank's" if several else ""
    said += f"{counted(len(before) - len(several), 'tensor')} have the same bits{more}; "
    steps, why = resumed.num_steps - 1, _incomparable(resumed, reference)
    if steps < 1 or why:
        return Statement(
            "checkpoint", True, "measured", f"{said}how it trains on there was not looked at: {why or 'it made no other step'}"
        )
    assert reference is not None
    if not resumed.is_well and reference.is_well:
        return Statement("checkpoint", False, "measured", f"{said}then {resumed.why()}, and not on the reference")
    if differences := _compared(resumed, reference, exact).differences:
        first = differences[0]
        said += f"in step {first.step - 1} after that it trains otherwise than the reference from the same state: {first.said}"
        return Statement("checkpoint", False, "measured", said, names=first.names, ranks=first.ranks)
    return Statement(
        "checkpoint", True, "measured", f"{said}it trains on for {counted(steps, 'step')} as the reference does from there"
    )


def _compared(real: Run, reference: Run, exact: Run | None) -> Compared:
    return compare(
        real.events, reference.events, exact.events if exact is not None and exact.num_steps else None, is_whole=real.is_well
    )


def _of_plan(real: Run, plan: Planned | str | None) -> Statement:
    kept = next((each["state"] for each in real.events.get(0, ()) if each["kind"] == "kept"), None)
    if not isinstance(kept, StateBytes) or not isinstance(plan, tuple):
        return not_looked_at("plan", plan if isinstance(plan, str) else "that takes the second step of a script of fsdp2")
    planned = plan[0]
    told = ", ".join(
        f"{in_bytes(getattr(kept, part))} {part} (planned: {in_bytes(getattr(planned, part))})" for part in kept.__dataclass_fields__
    )
    said = f"before the second optimizer step rank 0 keeps {told}"
    return Statement("plan", kept == planned or None, "measured", said)


def _wrong_order(at_once: Run, run: Run) -> Statement | None:
    """Where a run in another order fails, or has other bits."""
    fix = "let the stream that reads wait for the stream that writes (Stream.wait_stream); keep what it reads alive (record_stream)"
    found = [(run.num_steps, first.rank, run.why())] if (first := run.ranks.first_failed) is not None else []
    for rank, events in run.events.items() if run.is_well else ():
        at_once_seen = [each for each in at_once.events[rank] if each["kind"] == "seen"]
        differing = (one for one, other in zip(at_once_seen, events, strict=False) if one != other)
        found += [(one["step"], rank, f"{one['what']} is another than at once") for one in differing][:1]
    if not found:
        return None
    step, rank, what = min(found)
    said = f"in order {run.role.removeprefix('order')}, {what}"
    return Statement("orders", False, "measured on a stand-in", said, fix, step=step, ranks=(rank,))


def _of_comparison(real: Run, reference: Run | None, exact: Run | None) -> Iterator[Statement]:
    why = _incomparable(real, reference)
    if why or reference is None:
        yield from (not_looked_at(subject, why) for subject in _SUBJECTS.values())
        return
    found = _compared(real, reference, exact)
    first = {phase: [each for each in found.differences if each.phase == phase] for phase in _SUBJECTS}
    for each in sorted((each[0] for each in first.values() if each), key=found.differences.index):
        same = [other for other in first[each.phase] if other.step == each.step]
        names = tuple(name for other in same for name in other.names)
        said = "; ".join(other.said for other in same[:3])
        yield Statement(_SUBJECTS[each.phase], False, "measured", said, step=each.step, names=names, ranks=each.ranks)
    for phase, subject in _SUBJECTS.items():
        if not first[phase]:
            yield _agreement(subject, phase, found, exact is not None and exact.num_steps > 0)


def _agreement(subject: str, phase: str, found: Compared, has_exact: bool) -> Statement:
    number, rough = found.counts.get(phase, 0), found.rough.get(phase, 0)
    if not number:
        return not_looked_at(subject, "the program has none" if phase == "buffers" else "none was seen")
    if rough == number:
        return not_looked_at(subject, f"rounding may change all {number} by half of their size or more")
    share = f"the worst at {found.share[phase]:.1%} of what rounding may change"
    but = f"; {rough} of them say little, because rounding may change them by half of their size" if rough else ""
    without = "" if has_exact else "; the reference did not run in fp64, so the bound has only the dtypes"
    return Statement(subject, True, "measured", f"{number} {subject} are the reference's, {share}{but}{without}")


def _of_equal_ranks(reference: Run | None) -> Statement:
    """What a program does on some ranks only, a shard hides: the whole parameter shows it."""
    if reference is None or not reference.num_steps:
        return not_looked_at("ranks", "the reference could not run the program")
    if not moments_of(reference.events):
        return not_looked_at("ranks", "on the reference, some ranks made no optimizer step")
    found = first_that_ranks_do_not_share(reference.events)
    if found is None:
        return Statement("ranks", True, "measured", "on the reference, ranks that average a parameter's gradients keep it the same")
    fix = "change gradients and parameters, step and clip on all ranks, with the same options; tensor parallelism needs the same data"
    return Statement("ranks", False, "measured", found.said, fix, step=found.step, names=found.names, ranks=found.ranks)


def _incomparable(real: Run, reference: Run | None) -> str:
    if reference is None:
        return "the reference was not run"
    if not reference.num_steps:
        return f"the reference could not run the program: {reference.why()}"
    if not real.num_steps:
        return "the program made no step"
    digests = [
        {rank: next((each["digest"] for each in events if each["kind"] == "inputs"), None) for rank, events in run.events.items()}
        for run in (real, reference)
    ]
    if digests[0] != digests[1]:
        ranks = [rank for rank in digests[0] if digests[0][rank] != digests[1][rank]]
        return (
            f"on {of_ranks(ranks)} the first inputs are not those of the run on the reference: they come from the clock, or from a "
            "random generator that drew other numbers before, as for parameters that are made on shards; seed it after these"
        )
    return ""
