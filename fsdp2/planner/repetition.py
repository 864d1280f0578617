"""A model of many equal blocks: its figures from those of the same model with fewer of them. Pure functions, but for ``fewer_blocks``.

Each block adds the same to every figure of a step: to the bytes at each moment, to what is communicated, to what is kept. So the
figures of models with n and with n + 1 blocks give those with any more. Whether that holds is checked with a model of n + 2 blocks,
to the byte; where it does not, all blocks are rehearsed. Only durations need not fall on a line: they may be off it by a part in a
thousand.

Worked example, 128 blocks: 5 of them peak at 30 GB, 6 at 31 GB and 7 at 32 GB, in backward of the last one. So 128 peak at 153 GB.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..state_bytes import StateBytes
from .duration import Duration
from .memory import FileBytes, Visit
from .rehearsal import GroupFacts
from .traffic import Traffic
from .workload import Workload

_TOLERANCE = 1e-3
"""The tolerance of durations: some blocks pass until one stream has caught up with another."""


@dataclass(frozen=True)
class Figures:
    """What a rehearsal says of a step."""

    numel: int
    state: StateBytes
    groups: tuple[GroupFacts, ...]
    visits: Sequence[Visit]
    traffic: tuple[Traffic, ...]
    duration: Duration | None
    files: FileBytes


class NotAlikeError(Exception):
    """Blocks do not add the same; no error of the user's."""


@dataclass(frozen=True)
class Fewer:
    """The same workload with n, n + 1 and n + 2 blocks. times: how many more than n + 2 it has"""

    workloads: tuple[Workload, Workload, Workload]
    times: int


def fewer_blocks(workload: Workload, prefetch: int, gradients_on_host: bool) -> Fewer | None:
    """None if ``workload`` does not say which blocks are repeated, or has too few of them for this to pay."""
    if not workload.repeated:
        return None
    with torch.device("meta"):
        blocks = workload.build().get_submodule(workload.repeated)
    assert isinstance(blocks, nn.ModuleList)
    start, count = _longest_run([_signature(block) for block in blocks])
    # The first and the last block, and those that a prefetch reaches from there, are not like the ones in between. Without
    # prefetching a reduction still reaches into the next block: its buffer is there until it has ended. Where gradients are copied
    # to the host after it, the buffer is there for one block more.
    reach = max(prefetch, 1) + gradients_on_host
    enough = len(blocks) - count + 3 + 2 * reach
    if count < 2 * (enough + 2):
        return None

    def with_blocks(number: int) -> Workload:
        def build() -> nn.Module:
            model = workload.build()
            blocks: Any = model.get_submodule(workload.repeated)
            del blocks[start + 1 : start + 1 + count - number]
            return model

        return replace(workload, build=build)

    return Fewer((with_blocks(enough), with_blocks(enough + 1), with_blocks(enough + 2)), count - enough - 2)


def figures_of_many(fewer: tuple[Figures, Figures, Figures], repeated: str, times: int) -> Figures:
    """fewer: with n, n + 1 and n + 2 blocks; times: how many more than n + 2. Raises: NotAlikeError if each does not add the same"""
    small, middle, large = fewer
    expected = figures_of_more(small, middle, repeated, 1)
    if replace(expected, duration=None) != replace(large, duration=None) or not _are_close(expected.duration, large.duration):
        raise NotAlikeError
    return figures_of_more(middle, large, repeated, times)


def _signature(block: nn.Module) -> tuple[object, ...]:
    tensors = itertools.chain(block.named_parameters(), block.named_buffers())
    return tuple(map(type, block.modules())), tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _longest_run(values: Sequence[object]) -> tuple[int, int]:
    """The start of the longest run of equal ``values``, and its length."""
    runs, start = [(0, 0)], 0
    for _, equal in itertools.groupby(values):
        count = len(list(equal))
        runs.append((start, count))
        start += count
    return max(runs, key=lambda run: run[1])


def a_group_grows(small: Figures, large: Figures) -> bool:
    """Whether a group holds parameters of all blocks, as a root may. Its storages are rounded up, so bytes do not fall on a line."""
    half, added = len(small.groups) // 2, len(large.groups) - len(small.groups)
    same = zip(small.groups, [*large.groups[:half], *large.groups[half + added :]], strict=False)
    return any(a.numel != b.numel for a, b in same)


def figures_of_more(small: Figures, large: Figures, repeated: str, times: int) -> Figures:
    """Of a model with ``times`` blocks more than ``large``, which has one more than ``small``. Raises: NotAlikeError"""
    state = [_on(a, b, times) for a, b in zip(_parts(small.state), _parts(large.state), strict=True)]
    return Figures(
        numel=_on(small.numel, large.numel, times),
        state=StateBytes(*state),
        groups=_groups(small.groups, large.groups, repeated, times),
        visits=_visits(small.visits, large.visits, repeated, times),
        traffic=_traffic(small.traffic, large.traffic, times),
        duration=_duration(small.duration, large.duration, times),
        files=FileBytes(
            nbytes=_on(small.files.nbytes, large.files.nbytes, times),
            in_memory=_on(small.files.in_memory, large.files.in_memory, times),
        ),
    )


_Number = TypeVar("_Number", int, float)


def _on(small: _Number, large: _Number, times: int) -> _Number:
    return large + times * (large - small)


def _parts(state: StateBytes) -> tuple[float, ...]:
    return state.compute, state.gradients, state.master, state.optimizer


def _by_key(small: Mapping[str, _Number], large: Mapping[str, _Number], times: int) -> dict[str, _Number]:
    nothing = 0
    return {key: _on(small.get(key, nothing), large.get(key, nothing), times) for key in {**small, **large}}


def _name(small: str, large: str, repeated: str, times: int) -> str:
    """blocks.5 and blocks.6 -> blocks.128; names that are equal stay."""
    if small == large:
        return large
    head, before, rest = _numbered(small, repeated)
    _, after, other = _numbered(large, repeated)
    if after != before + 1 or rest != other:
        raise NotAlikeError
    return f"{head}{after + times}{rest}"


def _numbered(name: str, repeated: str) -> tuple[str, int, str]:
    """blocks.5.experts -> "blocks.", 5, ".experts" """
    found = re.match(rf"({re.escape(repeated)}\.)(\d+)(.*)", name)
    if found is None:
        raise NotAlikeError
    return found[1], int(found[2]), found[3]


def _groups(small: Sequence[GroupFacts], large: Sequence[GroupFacts], repeated: str, times: int) -> tuple[GroupFacts, ...]:
    """Those at the begin and at the end grow where they hold parameters of all blocks, as the root holds norms; then the blocks'."""
    half, added = len(small) // 2, len(large) - len(small)
    if not 0 <= added <= half:
        raise NotAlikeError
    ends = [_extended_group(*pair, repeated, times) for pair in zip(small, [*large[:half], *large[half + added :]], strict=True)]
    period = large[half : half + added]

    def later(group: GroupFacts, by: int) -> GroupFacts:
        begin, number, rest = _numbered(group.name, repeated)
        return replace(group, name=f"{begin}{number + by}{rest}")

    between = [later(group, number) for number in range(times + 1) for group in period]
    return (*ends[:half], *between, *ends[half:])


def _extended_group(small: GroupFacts, large: GroupFacts, repeated: str, times: int) -> GroupFacts:
    return GroupFacts(
        name=_name(small.name, large.name, repeated, times),
        dtype=large.dtype,
        numel=_on(small.numel, large.numel, times),
        sharded=_on(small.sharded, large.sharded, times),
        unsharded=_on(small.unsharded, large.unsharded, times),
        padding=_on(small.padding, large.padding, times),
    )


def _visits(small: Sequence[Visit], large: Sequence[Visit], repeated: str, times: int) -> list[Visit]:
    """Phase by phase those at its begin, then those of the blocks that both leave out, then those at its end."""
    phases, of_small = _phases(large), _phases(small)
    if [phase for phase, _ in phases] != [phase for phase, _ in of_small]:
        raise NotAlikeError
    found: list[Visit] = []
    for (_, several), (_, few) in zip(phases, of_small, strict=True):
        added, half = len(several) - len(few), len(few) // 2
        if not 0 <= added <= half:
            raise NotAlikeError
        ends = [_extended_visit(*pair, repeated, times) for pair in zip(few, [*several[:half], *several[half + added :]], strict=True)]
        head, tail = ends[:half], ends[half:]
        periods = times + 1  # between the last one of the head and the first one of the tail
        between = [
            _visit_between(head[half - added + number], tail[number], repeated, period, periods + 1)
            for period in range(1, periods + 1)
            for number in range(added)
        ]
        found += [*head, *between, *tail]
    return found


def _phases(visits: Iterable[Visit]) -> list[tuple[str, list[Visit]]]:
    return [(phase, list(each)) for phase, each in itertools.groupby(visits, key=lambda visit: visit.phase)]


def _extended_visit(small: Visit, large: Visit, repeated: str, times: int) -> Visit:
    return Visit(
        phase=small.phase,
        where=_name(small.where, large.where, repeated, times),
        moments=tuple(_by_key(a, b, times) for a, b in zip(small.moments, large.moments, strict=True)),
        most=_by_key(small.most, large.most, times),
        host=_on(small.host, large.host, times),
    )


def _visit_between(first: Visit, last: Visit, repeated: str, number: int, of: int) -> Visit:
    """Bytes grow, or fall, by the same from block to block: ``number`` of ``of`` steps from ``first`` to ``last``."""

    def at(a: int, b: int) -> int:
        return a + (b - a) * number // of

    def each_at(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
        return {key: at(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}

    return Visit(
        phase=first.phase,
        where=_name_between(first.where, last.where, repeated, number, of),
        moments=tuple(each_at(a, b) for a, b in zip(first.moments, last.moments, strict=True)),
        most=each_at(first.most, last.most),
        host=at(first.host, last.host),
    )


def _name_between(first: str, last: str, repeated: str, number: int, of: int) -> str:
    """blocks.2 and blocks.126 -> blocks.64, half way."""
    if first == last:
        return first
    head, at_first, rest = _numbered(first, repeated)
    _, at_last, other = _numbered(last, repeated)
    if rest != other or (at_last - at_first) % of:
        raise NotAlikeError
    return f"{head}{at_first + (at_last - at_first) // of * number}{rest}"


def _traffic(small: Sequence[Traffic], large: Sequence[Traffic], times: int) -> tuple[Traffic, ...]:
    if [(each.phase, each.kind, each.ranks) for each in small] != [(each.phase, each.kind, each.ranks) for each in large]:
        raise NotAlikeError
    return tuple(
        replace(
            after,
            launches=_on(before.launches, after.launches, times),
            sent=_on(before.sent, after.sent, times),
            leaves_host=_on(before.leaves_host, after.leaves_host, times),
        )
        for before, after in zip(small, large, strict=True)
    )


def _duration(small: Duration | None, large: Duration | None, times: int) -> Duration | None:
    if small is None or large is None:
        return None
    step = _on(small.step, large.step, times)
    return replace(
        large,
        step=step,
        computing=_on(small.computing, large.computing, times),
        exposed={phase: max(seconds, 0.0) for phase, seconds in _by_key(small.exposed, large.exposed, times).items()},
        idle=max(_on(small.idle, large.idle, times), 0.0),
        mfu=_on(small.mfu * small.step, large.mfu * large.step, times) / step,
    )


def _are_close(expected: Duration | None, found: Duration | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return math.isclose(expected.step, found.step, rel_tol=_TOLERANCE)
