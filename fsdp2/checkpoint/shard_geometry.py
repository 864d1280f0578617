"""The elements of a tensor that a rank keeps, as boxes of integers, and how to split a box into pieces of bounded size.

Worked example: 7 rows, cut first over 2 tensor-parallel ranks ([0, 4) and [4, 7)), then each half over 2 data-parallel ranks,
which DTensor writes as ``(_StridedShard(0, split_factor=2), Shard(0))`` on the mesh (dp, tp):

    (dp 0, tp 0) keeps rows [0, 2), (dp 1, tp 0) [2, 4), (dp 0, tp 1) [4, 6), (dp 1, tp 1) [6, 7)

Note: order of cuts. A strided placement means that later axes cut first. Read from left to right, as a strided cut that
leaves several intervals, it gives the same result for even chunks only: for 9 rows over (4, 2), dp rank 3 would have
the last row on tp rank 0, but cutting twice leaves it on tp rank 1. So cuts are put in order where possible.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..core.plan.layout import rows_of


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``[start[d], stop[d])`` of every dim; of a 0-d tensor (no dims) the one element that there is."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box:
        """The common elements; empty ranges, never negative ones, if there are none."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(max(low, min(pair)) for low, *pair in zip(start, self.stop, other.stop, strict=True)))

    def seen_from(self, origin: Sequence[int]) -> Box:
        """The same elements where ``origin`` counts as zero: ``Box((3,), (5,)).seen_from((2,)) == Box((1,), (3,))``."""
        return Box(
            tuple(start - zero for start, zero in zip(self.start, origin, strict=True)),
            tuple(stop - zero for stop, zero in zip(self.stop, origin, strict=True)),
        )

    def with_range(self, dim: int, start: int, stop: int) -> Box:
        return Box((*self.start[:dim], start, *self.start[dim + 1 :]), (*self.stop[:dim], stop, *self.stop[dim + 1 :]))


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis cuts ``dim`` into ``num_chunks`` as ``torch.chunk`` does, and this rank keeps chunk ``index``.

    split_factor: ranks of axes that cut earlier (``_StridedShard``): this axis cuts each of their pieces
    """

    dim: int
    num_chunks: int
    index: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``box`` of the whole tensor, which start at ``at`` in the local one."""

    box: Box
    at: tuple[int, ...]

    @property
    def local(self) -> Box:
        """The piece's box in the local tensor."""
        return Box(self.at, tuple(start + size for start, size in zip(self.at, self.box.shape, strict=True)))


Interval = tuple[int, int]


def in_order(cuts: Sequence[Cut]) -> list[Cut]:
    """``cuts``, which are by mesh axis, in the order in which they were made: each strided cut after those that it follows.

    A strided cut then becomes plain. If its factor matches no axes, it stays strided, and all cuts of its dim keep
    their order. See Note: order of cuts.
    """
    ordered: list[Cut] = []
    for dim in dict.fromkeys(cut.dim for cut in cuts):
        own = [cut for cut in cuts if cut.dim == dim]
        made: list[Cut] = []
        for cut in reversed(own):
            products = list(itertools.accumulate((each.num_chunks for each in made), operator.mul, initial=1))
            if cut.split_factor not in products:
                made = own
                break
            made.insert(products.index(cut.split_factor), Cut(dim, cut.num_chunks, cut.index))
        ordered += made
    return ordered


def pieces_of(shape: Sequence[int], cuts: Iterable[Cut]) -> list[Piece]:
    """The pieces of a tensor of ``shape`` that a rank keeps after ``cuts``, in order; none if its shard is empty.

    One piece, unless a strided cut leaves several ranges of a dim: ``pieces_of((8,), [Cut(0, 2, 0, 2)])`` has [0, 2)
    and [4, 6).
    """
    pieces = []
    for ranges in itertools.product(*map(_placed, _kept(shape, cuts))):
        box = Box(tuple(start for start, _, _ in ranges), tuple(stop for _, stop, _ in ranges))
        if box.numel > 0:
            pieces.append(Piece(box, tuple(at for _, _, at in ranges)))
    return pieces


def local_shape_of(shape: Sequence[int], cuts: Iterable[Cut]) -> tuple[int, ...]:
    """The shape of the local tensor: ``local_shape_of((7, 3), [Cut(0, 2, 1)]) == (3, 3)``."""
    return tuple(map(_length, _kept(shape, cuts)))


def _kept(shape: Sequence[int], cuts: Iterable[Cut]) -> list[list[Interval]]:
    """The ranges of each dim."""
    kept: list[list[Interval]] = [[(0, size)] for size in shape]
    for cut in cuts:
        kept[cut.dim] = _joined(_after(kept[cut.dim], cut))
    return kept


def _after(intervals: list[Interval], cut: Cut) -> list[Interval]:
    found: list[Interval] = []
    length = _length(intervals)
    for part in range(min(cut.split_factor, length)):  # the others are empty
        band = rows_of(length, part, cut.split_factor)
        own = rows_of(len(band), cut.index, cut.num_chunks)
        found += _positions(intervals, band.start + own.start, band.start + own.stop)
    return found


def _positions(intervals: list[Interval], first: int, last: int) -> Iterator[Interval]:
    """The elements at positions [first, last) of ``intervals`` laid one after another."""
    at = 0
    for start, stop in intervals:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            yield start + low, start + high
        at += stop - start


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _placed(intervals: list[Interval]) -> list[tuple[int, int, int]]:
    ends = itertools.accumulate((stop - start for start, stop in intervals), initial=0)
    return [(start, stop, at) for (start, stop), at in zip(intervals, ends, strict=False)]


def _length(intervals: Iterable[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def split(box: Box, max_numel: int) -> Iterator[Box]:
    """``box`` in boxes of at most ``max_numel`` elements, in the order in which a C-contiguous tensor has them.

    Of a whole tensor, the elements of each lie one after another: ``split(Box((0, 0), (4, 3)), 7)`` is rows [0, 2), [2, 4).
    """
    if box.numel <= max(max_numel, 1):
        if box.numel > 0:
            yield box
        return
    dim = next(index for index, size in enumerate(box.shape) if size > 1)
    row = math.prod(box.shape[dim + 1 :])
    step = max(max_numel // row, 1)
    for start in range(box.start[dim], box.stop[dim], step):
        yield from split(box.with_range(dim, start, min(start + step, box.stop[dim])), max_numel)


_PRIME = 2**127 - 1


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why ``boxes`` do not cover every element of ``shape`` once (out of bounds, overlap, gap); None if they do.

    Write element (i, j) as x**i * y**j. The elements of a box then add up to the product over dims of (x**start - x**stop) / (1 - x),
    and those of boxes that cover the shape once to that of the shape. Both sides are compared at a random place, modulo a prime: in a
    time that is linear in the boxes, where looking for two that meet is quadratic. Other boxes agree there with a probability of
    the sum of the sizes over 2**127.

    Source: Schwartz 1980, "Fast Probabilistic Algorithms for Verification of Polynomial Identities".
    """
    full = [box for box in boxes if box.numel]
    for box in full:
        if any(start < 0 or stop > size or start > stop for start, stop, size in zip(box.start, box.stop, shape, strict=True)):
            return f"{box.start} to {box.stop} is beyond"
    numel, wanted = sum(box.numel for box in full), math.prod(shape)
    if numel != wanted:
        return f"{numel} of {wanted} elements are there" + (": some overlap" if numel > wanted else "")
    places = [random.SystemRandom().randrange(_PRIME) for _ in shape]
    powers = functools.cache(lambda dim, exponent: pow(places[dim], exponent, _PRIME))

    def elements(box: Box) -> int:
        total = 1
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            total = total * (powers(dim, start) - powers(dim, stop)) % _PRIME
        return total

    same = len(full) == 1 or sum(map(elements, full)) % _PRIME == elements(Box.whole(shape))
    return None if same else "some of its elements overlap, and others are missing"
