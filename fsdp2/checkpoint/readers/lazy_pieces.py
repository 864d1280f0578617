"""Lazy tensors made of pieces: of boxes that ranks have saved, or of ranges of flat buffers.

Worked example: a (3, 4) weight at elements [6, 18) of a flat parameter that two ranks have cut in halves of 10 elements. Its rows
[1, 2) are elements [10, 14): all of them rank 1's first four.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..boxes import Box, split
from ..byte_ranges import BUFFER_NBYTES, ByteReader
from ..failure import failure
from ..lazy import LazyTensor, Stored
from ..safetensors_format import DTYPES


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of these strides lie one after another, in order; strides of dims of size 1 say nothing."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        if step != expected:
            return 0 in shape
        expected *= size
    return True


def dtype_of(lazy: LazyTensor) -> torch.dtype:
    """The dtype of its first stored part; pieces of one tensor have one dtype, which their assembler checks.

    Raises: CheckpointError if torch has no such dtype
    """
    part = next(lazy.stored())
    found = DTYPES.get(part.entry.dtype)
    if found is None:
        raise failure(
            f"{part.path} has {part.key} in {part.entry.dtype[:100]}",
            expected=", ".join(DTYPES),
            fix="convert it with a library that knows this dtype",
            file=part.path,
            key=part.key,
        )
    return found


@dataclass(frozen=True, eq=False)
class Strided(LazyTensor):
    """``span.as_strided(shape, stride)``, the span being 1-D. Memory: the whole span while it is read."""

    span: Stored
    shape_: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_

    def stored(self) -> Iterator[Stored]:
        yield self.span

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        if box.numel == 0:
            return
        whole = torch.empty(self.span.shape, dtype=dtype_of(self.span), device="cpu")
        self.span.read(Box.whole(self.span.shape), whole, reader)
        out.copy_(whole.as_strided(self.shape_, self.stride)[box.slices])


@dataclass(frozen=True, eq=False)
class Signed(LazyTensor):
    """``whole``, negated ("neg" in ``bits``) or conjugated ("conj"): torch saves such a view as its base's elements and these bits."""

    whole: LazyTensor
    bits: frozenset[str]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    def stored(self) -> Iterator[Stored]:
        return self.whole.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        self.whole.read(box, out, reader)
        if "neg" in self.bits:
            out.neg_()
        if "conj" in self.bits:
            out.conj_physical_()


@dataclass(frozen=True, eq=False)
class Assembled(LazyTensor):
    """A tensor of boxes that together cover it, each element once."""

    shape_: tuple[int, ...]
    parts: tuple[tuple[Box, LazyTensor], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_

    def stored(self) -> Iterator[Stored]:
        for _, part in self.parts:
            yield from part.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        for place, part in self.parts:
            common = box.intersect(place)
            if common.numel > 0 or not self.shape_:
                part.read(common.seen_from(place.start), out[common.seen_from(box.start).slices], reader)


@dataclass(frozen=True, eq=False)
class Flat(LazyTensor):
    """``cat(parts)[start : start + prod(shape)].view(shape)`` of 1-D parts."""

    parts: tuple[LazyTensor, ...]
    start: int
    shape_: tuple[int, ...]
    ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ends, end = [], 0
        for part in self.parts:
            end += part.shape[0]
            ends.append(end)
        object.__setattr__(self, "ends", tuple(ends))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_

    def needed(self) -> Iterator[tuple[int, int, LazyTensor]]:
        """The parts that it needs, each with its range of the concatenation."""
        first, last = self.start, self.start + math.prod(self.shape_)
        for part, end in zip(self.parts, self.ends, strict=True):
            if end > first and end - part.shape[0] < last:
                yield end - part.shape[0], end, part

    def stored(self) -> Iterator[Stored]:
        for _, _, part in self.needed():
            yield from part.stored()
        if not math.prod(self.shape_):
            yield from self.parts[0].stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Rows that lie one after another are read straight; of a narrower box, bands of whole rows, from which it is taken."""
        if box.numel == 0:
            return
        row = Box((*box.start[:1], *[0] * (len(self.shape_) - 1)), (*box.stop[:1], *self.shape_[1:]))
        if row == box and out.is_contiguous():
            self._read_range(box, out.view(-1), reader)
            return
        itemsize = dtype_of(self).itemsize
        for band in split(row, max(BUFFER_NBYTES // itemsize, 1)):
            common = band.intersect(box)
            if common.numel > 0:
                values = torch.empty(band.shape, dtype=dtype_of(self), device="cpu")
                self._read_range(band, values.view(-1), reader)
                out[common.seen_from(box.start).slices].copy_(values[common.seen_from(band.start).slices])

    def _read_range(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Read ``box``, which is one run of elements."""
        strides = [math.prod(self.shape_[dim + 1 :]) for dim in range(len(self.shape_))]
        first = self.start + sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        last = first + box.numel
        for begin, end, part in self.needed():
            low, high = max(first, begin), min(last, end)
            if low < high:
                part.read(Box((low - begin,), (high - begin,)), out[low - first : high - first], reader)
