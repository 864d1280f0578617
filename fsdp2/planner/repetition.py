"""A step of many equal parts: its figures from those of a step with fewer of them. Pure functions, but for ``fewer_blocks``.

Of many micro-batches the first, the second and the last are rehearsed; those in between do what the second does.

Each block of a model adds the same to every figure of a step: to the bytes at each moment, to what is communicated, to what is kept.
So the figures of models with n and with n + 1 blocks give those with any more. Whether that holds is checked with a model of n + 2
blocks, to the byte; where it does not, all blocks are rehearsed. Only durations need not fall on a line: they may be off it by a part
in a thousand.

Worked example, 128 blocks: 5 of them peak at 30 GB, 6 at 31 GB and 7 at 32 GB, in backward of the last one. So 128 peak at 153 GB.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..state_bytes import StateBytes
from ..testing.clock.trace import Entry
from .duration import Duration
from .memory import FileBytes, Visit
from .rehearsal import GroupFacts
from .traffic import Traffic
from .workload import Workload

_Part = TypeVar("_Part")
MICRO_BATCHES = 3
"""How many are rehearsed at most."""
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


def middle_of(entries: Sequence[Entry]) -> slice:
    """The second of three micro-batches; none of fewer."""
    starts = [index for index, entry in enumerate(entries) if entry.kind == "mark" and entry.name == "forward"]
    return slice(starts[1], starts[2]) if len(starts) == MICRO_BATCHES else slice(0, 0)


def with_middle_repeated(visits: Sequence[Visit], times: int) -> list[Visit]:
    """The visits of a step of three micro-batches, with those of the second, its forward and its backward, ``times`` times more."""
    phases = [each for _, each in _phases(visits)]
    return list(itertools.chain(*phases[:5], *phases[3:5] * times, *phases[5:]))


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
    return any(a.numel != b.numel for a, b in _ends(small.groups, large.groups))


def figures_of_more(small: Figures, large: Figures, repeated: str, times: int) -> Figures:
    """With ``times`` blocks more than ``large``, which has one more than ``small``. Raises: NotAlikeError"""

    def on_line(a: Any, b: Any) -> Any:
        return _joined(a, b, lambda a, b: b + times * (b - a), repeated)

    phases, of_small = _phases(large.visits), _phases(small.visits)
    if [phase for phase, _ in phases] != [phase for phase, _ in of_small]:
        raise NotAlikeError
    visits = [_extended(few, several, repeated, times) for (_, few), (_, several) in zip(of_small, phases, strict=True)]
    return Figures(
        numel=on_line(small.numel, large.numel),
        state=on_line(small.state, large.state),
        groups=tuple(_extended(small.groups, large.groups, repeated, times)),
        visits=list(itertools.chain(*visits)),
        traffic=on_line(small.traffic, large.traffic),
        duration=_duration(small.duration, large.duration, on_line),
        files=on_line(small.files, large.files),
    )


def _joined(first: Any, last: Any, number: Callable[[Any, Any], Any], repeated: str) -> Any:
    """One value from two of the same form: ``number`` of their numbers, and of the blocks' in names such as "blocks.5.experts"."""

    def join(a: Any, b: Any) -> Any:
        if isinstance(b, (int, float)):
            return number(a, b)
        if isinstance(b, dict):
            return {key: number(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}
        if isinstance(b, tuple) and len(a) == len(b):
            return tuple(map(join, a, b))
        if is_dataclass(b) and not isinstance(b, type):
            return replace(b, **{each.name: join(getattr(a, each.name), getattr(b, each.name)) for each in fields(b)})
        if a == b:
            return b
        names = [re.match(rf"({re.escape(repeated)}\.)(\d+)(.*)", each) for each in (a, b) if isinstance(each, str)]
        before, after = names if len(names) == 2 else (None, None)
        if before is None or after is None or before[3] != after[3]:
            raise NotAlikeError
        return f"{before[1]}{number(int(before[2]), int(after[2]))}{before[3]}"

    return join(first, last)


def _ends(small: Sequence[_Part], large: Sequence[_Part]) -> list[tuple[_Part, _Part]]:
    """The begin and the end of both; ``large`` has more in between."""
    half, added = len(small) // 2, len(large) - len(small)
    return list(zip(small, [*large[:half], *large[half + added :]], strict=False))


def _extended(small: Sequence[_Part], large: Sequence[_Part], repeated: str, times: int) -> list[_Part]:
    """What is at the begin of both, then that of the blocks that both leave out, then what is at the end.

    Values of the blocks in between grow, or fall, by the same from block to block.
    """
    half, added = len(small) // 2, len(large) - len(small)
    if not 0 <= added <= half:
        raise NotAlikeError
    ends = [_joined(a, b, lambda a, b: b + times * (b - a), repeated) for a, b in _ends(small, large)]
    head, tail, of = ends[:half], ends[half:], times + 2

    def at(step: int) -> Callable[[int, int], int]:
        return lambda a, b: a + (b - a) * step // of

    between = [_joined(head[half - added + each], tail[each], at(step), repeated) for step in range(1, of) for each in range(added)]
    return [*head, *between, *tail]


def _phases(visits: Iterable[Visit]) -> list[tuple[str, list[Visit]]]:
    return [(phase, list(each)) for phase, each in itertools.groupby(visits, key=lambda visit: visit.phase)]


def _duration(small: Duration | None, large: Duration | None, on_line: Callable[[Any, Any], Any]) -> Duration | None:
    if small is None or large is None:
        return None
    found: Duration = on_line(small, large)
    return replace(
        found,
        exposed={phase: max(seconds, 0.0) for phase, seconds in found.exposed.items()},
        idle=max(found.idle, 0.0),
        mfu=on_line(small.mfu * small.step, large.mfu * large.step) / found.step,
    )


def _are_close(expected: Duration | None, found: Duration | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return math.isclose(expected.step, found.step, rel_tol=_TOLERANCE)
