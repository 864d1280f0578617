"""Where a run on an implementation differs from the same run on the reference by more than rounding. Pure.

The reference says how much is rounding: run with the program's dtypes (r) and in fp64 (x), it differs from itself by |r - x|, with all
that the program amplifies. The implementation (i) rounds in another order, and elsewhere:

    |i - r| <= MARGIN |r - x| + limit(eps) size        size: of a gradient, its norm; of a parameter, what training has added to it

``limit`` is that of ``fsdp2 diff``, for the coarsest dtype of the parameter's policy; a parameter adds 4 rounding units of its dtype.
MARGIN is 8: the worst of many draws, where the reference is one (the fuzzer's margin is 16, of single elements). The largest |r - x| so
far of the same tensor counts, relative to its size. A tensor counts as large as its share of all, by elements: gradients that are
zero but for rounding (biases under a norm) have no other scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..inspector.difference import limit
from ..printable import alike, of_ranks
from .parts import Seen

MARGIN = 8.0
TOO_ROUGH = 0.5
"""A bound, relative to the size, beyond which a comparison says nothing."""

Events = Mapping[int, Sequence[Mapping[str, Any]]]
"""Of one run, by rank."""
PHASES = ("loss", "gradients", "parameters", "buffers")


@dataclass(frozen=True)
class Difference:
    """Tensors, or losses, that differ in the same way. ranks: of losses; of tensors, the lowest of each copy that differs"""

    step: int
    phase: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    said: str


@dataclass
class Compared:
    """differences: in the order of the program; counts: tensors that were compared, by phase; rough: those of them that say nothing

    share: the largest difference in relation to its bound, by phase
    """

    differences: list[Difference] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    rough: dict[str, int] = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)

    def note(self, phase: str, distance: float, bound: float, size: float) -> bool:
        """Whether it is a difference."""
        self.counts[phase] = self.counts.get(phase, 0) + 1
        if bound > TOO_ROUGH * size and size > 0:
            self.rough[phase] = self.rough.get(phase, 0) + 1
        self.share[phase] = max(self.share.get(phase, 0.0), distance / bound if bound else math.inf if distance else 0.0)
        return not distance <= bound  # NaN differs


def compare(real: Events, reference: Events, exact: Events | None, *, is_whole: bool = True) -> Compared:
    """exact: the reference in fp64; None: it could not run, and MARGIN has nothing to go by. is_whole: the run came to its end"""
    found = Compared()
    _compare_losses(found, real, reference, exact, is_whole)
    found.differences += _wrong_beginnings(real, reference)
    tensors = _Tensors(found, reference)
    for key in dict.fromkeys(key for events in (reference, real) for key in moments_of(events)):
        tensors.compare(key, wholes(real, key), wholes(reference, key), wholes(exact or {}, key))
    found.differences.sort(key=lambda each: (each.step, PHASES.index(each.phase)))
    return found


def _wrong_beginnings(real: Events, reference: Events) -> Iterator[Difference]:
    """Parameters that nobody has changed between ``fully_shard`` and the first forward of the reference."""
    kept = [{name for e in events if e["kind"] == "as made" for name in e["names"]} for events in reference.values()]
    ours, theirs = (wholes(each, (1, "start", 0)) for each in (real, reference))
    wrong: dict[str, int] = {}
    for name in (name for name in theirs if all(name in of_rank for of_rank in kept)):
        for copy, own in ours.get(name, {}).items():
            other = of_copy(theirs[name], copy)
            if other is not None and own.made.checksum != other.made.checksum and own.distance(other) > 1e-6 * other.made.norm:
                wrong[name] = copy
    if wrong:
        said = f"{next(iter(wrong))} begins with other values than it had when fully_shard was called{_and_more(wrong)}"
        yield Difference(1, "parameters", tuple(wrong), tuple(sorted(set(wrong.values()))), said)


def _and_more(names: Collection[str]) -> str:
    """After the first of ``names``: how many others there are."""
    return f", and {len(names) - 1} more like it" if len(names) > 1 else ""


def _compare_losses(found: Compared, real: Events, reference: Events, exact: Events | None, is_whole: bool) -> None:
    by_rank = {rank: [_losses(events, rank) for events in (real, reference, exact or {})] for rank in real}
    off = max(
        (abs(a - b) for _, rounded, full in by_rank.values() for (_, a, _), (_, b, _) in zip(rounded, full, strict=False)), default=0.0
    )
    wrong: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
    for rank, (ours, theirs, _) in by_rank.items():
        for number, ((step, mine, _), (_, its, eps)) in enumerate(zip(ours, theirs, strict=False)):
            same = mine == its or (math.isnan(mine) and math.isnan(its))
            bound = MARGIN * off + limit(eps if eps < 1e-4 else eps / 4) * abs(its)
            if found.note("loss", 0.0 if same else abs(mine - its), bound, abs(its)):
                wrong.setdefault((step, number), []).append((rank, mine, its))
        if is_whole and len(ours) != len(theirs):
            what = f"backward was called {len(ours)} times, and {len(theirs)} times on the reference"
            found.differences.append(Difference(max((step for step, _, _ in ours), default=1), "loss", (), (rank,), what))
    for (step, _), each in wrong.items():
        rank, mine, its = each[0]
        what = f"the loss is {mine:.6g} on rank {rank}, and {its:.6g} on the reference"
        found.differences.append(Difference(step, "loss", (), tuple(rank for rank, *_ in each), what))


def _losses(events: Events, rank: int) -> list[tuple[int, float, float]]:
    return [(each["step"], value, each["eps"]) for each in events.get(rank, ()) if each["kind"] == "loss" for value in each["values"]]


Key = tuple[int, str, int]
"""Step, phase and optimizer of what all ranks have recorded."""


def moments_of(events: Events) -> list[Key]:
    """In the order of the lowest rank; those that all ranks have."""
    each = [[(e["step"], e["kind"], e["optimizer"]) for e in of_rank if e["kind"] in PHASES[1:]] for of_rank in events.values()]
    return [key for key in each[0] if all(key in other for other in each)] if each else []


def wholes(events: Events, key: Key) -> dict[str, dict[int, Seen]]:
    """By name, and by copy: each a sum over the ranks that have a part of it."""
    found: dict[str, dict[int, Seen]] = {}
    for of_rank in events.values():
        for event in of_rank:
            if (event["step"], event["kind"], event.get("optimizer", 0)) == key:
                for name, seen in event["values"].items():
                    copies = found.setdefault(name, {})
                    before = copies.get(seen.copy)
                    copies[seen.copy] = seen if before is None else replace(before, made=before.made + seen.made)
    return found


def of_copy(copies: dict[int, Seen] | None, copy: int) -> Seen | None:
    return None if not copies else copies.get(copy, copies[min(copies)])


class _Tensors:
    """Compares the tensors of one moment after the other; remembers how far rounding has carried each."""

    def __init__(self, found: Compared, reference: Events) -> None:
        self._found = found
        self._start = wholes(reference, (1, "start", 0))
        self._relative: dict[tuple[str, str], float] = {}

    def compare(self, key: Key, real: Any, reference: Any, exact: Any) -> None:
        step, phase, _ = key
        total = sum(each[min(each)].made.squares for each in reference.values())
        numel = sum(each[min(each)].numel for each in reference.values()) or 1
        wrong: dict[str, list[tuple[float, str, str, int]]] = {}
        for name in dict.fromkeys([*reference, *real]):
            for copy in real.get(name) or reference[name]:
                ours, theirs, full = (of_copy(each.get(name), copy) for each in (real, reference, exact))
                share, what = self._difference(phase, name, ours, theirs, full, copy, total / numel)
                if what:
                    ratio = _ratio(ours, theirs)
                    kind = what if not share else "differs" if ratio is None else f"is {ratio:.4g} times the reference's"
                    wrong.setdefault(kind, []).append((share, what if kind == "differs" else kind, name, copy))
        for each in wrong.values():
            names = tuple(dict.fromkeys(name for _, _, name, _ in each))
            ranks = tuple(sorted({copy for *_, copy in each}))
            worst = max(each, key=lambda found: found[0])
            self._found.differences.append(Difference(step, phase, names, ranks, f"{worst[2]} {worst[1]}{_and_more(names)}"))

    def _difference(
        self, phase: str, name: str, ours: Seen | None, theirs: Seen | None, full: Seen | None, copy: int, mean_square: float
    ) -> tuple[float, str]:
        """How much larger than rounding the difference is, and what it is; 0.0: it has no size."""
        if ours is None or theirs is None:
            has, other = ("on the reference", "the program") if ours is None else ("in the program", "the reference")
            if theirs is None and ours is not None and not ours.made.squares:
                return 0.0, ""  # zeros where nothing is
            return 0.0, f"is there {has} only: {other} has none"
        size = max(theirs.made.norm, math.sqrt(mean_square * theirs.numel)) if phase == "gradients" else theirs.made.norm
        bound = 0.0
        if phase == "parameters":
            start = of_copy(self._start.get(name), copy)
            bound = 4 * theirs.dtype_eps * theirs.made.norm
            size = theirs.distance(start)
        off = theirs.distance(full) if full is not None else 0.0
        if math.isfinite(off) and size > 0:
            key = phase, name
            self._relative[key] = max(self._relative.get(key, 0.0), off / size)
            off = self._relative[key] * size
        bound += MARGIN * off + limit(max(theirs.eps, theirs.dtype_eps)) * size
        if ours.made.checksum == theirs.made.checksum:
            self._found.note(phase, 0.0, bound, size)
            return 0.0, ""
        distance = ours.distance(theirs)
        if not self._found.note(phase, distance, bound, size):
            return 0.0, ""
        if not ours.made.squares:
            return 0.0, "is zero, and not on the reference"
        if not math.isfinite(ours.made.squares):
            return 0.0, "is not finite, and is on the reference"
        percent = distance / theirs.made.norm if theirs.made.norm else math.inf
        said = f"differs by {percent:.3g} of its norm, where rounding may change {bound / (theirs.made.norm or 1):.3g}"
        return distance / bound if bound else math.inf, said


def _ratio(ours: Seen | None, theirs: Seen | None) -> float | None:
    """By what the implementation's tensor is multiplied, if by one number."""
    if ours is None or theirs is None or not ours.made.squares or not math.isfinite(ours.made.squares):
        return None
    a, b = ours.made.sketch, theirs.made.sketch
    along, norm = sum(x * y for x, y in zip(a, b, strict=True)), sum(y * y for y in b)
    ratio = along / norm if norm else 0.0
    rest = math.sqrt(sum((x - ratio * y) ** 2 for x, y in zip(a, b, strict=True)) / norm) if norm else math.inf
    return ratio if ratio and abs(ratio - 1) > 0.02 and rest < 0.02 * abs(ratio) else None


def first_that_ranks_do_not_share(reference: Events) -> Difference | None:
    """On the reference, ranks that average a parameter's gradients all keep the whole parameter: where two first have other values.
    Ranks of tensor parallelism do so, too, with what it has not cut.

    Parameters that no call has count as well, if ranks begin with the same values: experts of ranks do not.
    """
    peers: dict[int, dict[str, list[list[int]]]] = {
        rank: next((each["peers"] for each in events if each["kind"] == "peers"), {}) for rank, events in reference.items()
    }
    alone = {name for events in reference.values() for each in events if each["kind"] == "peers" for name in each["alone"]}
    start = wholes(reference, (1, "start", 0))
    for key in moments_of(reference):
        wrong: dict[str, set[int]] = {}
        for name, copies in wholes(reference, key).items() if key[1] == "parameters" else ():
            for group in (group for rank in copies for group in peers.get(rank, {}).get(name, ())):
                if _differ(copies, group) and not (name in alone and _differ(start.get(name, {}), group)):
                    wrong.setdefault(name, set()).update(group)
        if wrong:
            name, ranks = next(iter(wrong.items()))
            why = ": no fully_shard call averages its gradients" if name in alone else ""
            said = f"{name} differs between these ranks of the reference, where each rank keeps all of it{why}{_and_more(wrong)}"
            return Difference(key[0], "parameters", tuple(wrong), tuple(sorted(ranks)), said)
    return None


def _differ(copies: Mapping[int, Seen], ranks: Sequence[int]) -> bool:
    return len({copies[rank].made.checksum for rank in ranks if rank in copies}) > 1


def first_differing_call(calls: Mapping[int, Sequence[str]]) -> str | None:
    """Where ranks of one process group have first issued different collectives. calls: the lines of each rank"""
    by_group: dict[str, dict[int, list[str]]] = {}
    for rank, lines in calls.items():
        for line in lines:
            name, numel, dtype, ranks, *place = line.split(" ", 4)
            said = f"{name} of {numel} {dtype}" if numel != "-" else name
            by_group.setdefault(ranks, {}).setdefault(rank, []).append(said + "".join(f" ({where})" for where in place if where))
    for ranks, of_rank in by_group.items():
        members = [int(each) for each in ranks.split(",")]
        by_number = itertools.zip_longest(*(of_rank.get(rank, []) for rank in members), fillvalue="none")
        for number, here in enumerate(by_number, 1):
            if len({each.partition(" (")[0] for each in here}) > 1:
                told = "; ".join(f"{of_ranks(who)}: {what}" for what, who in alike(dict(zip(members, here, strict=True))))
                return f"collective {number} of ranks {ranks} is not the same: {told}"
    return None


__all__ = [
    *("MARGIN", "Compared", "Difference", "Events"),
    *("compare", "first_differing_call", "first_that_ranks_do_not_share", "moments_of", "wholes"),
]
