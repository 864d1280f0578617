"""Tensors of a checkpoint that are not read yet: stored ones, and combinations of them.

A lazy tensor has a shape and reads any box of itself. A rank that keeps rows [6, 8) of a fused weight reads just these,
from the stored tensors that hold them.

Worked examples: ``joined((q, k), dim=0)`` of (4, 8) and (2, 8) has shape (6, 8); its rows [3, 5) are row 3 of q and row
0 of k. A ``slice_of`` (3, 4) weight at elements [6, 18) of a flat parameter that two ranks cut in halves of 10: its
rows [1, 2) are elements [10, 14), rank 1's first four.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .failures import failure
from .file_reading import BUFFER_NBYTES, ByteReader
from .shard_geometry import Box, split

State = dict[str, Any]
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LazyTensor(ABC):
    """A tensor that can be read in boxes. Ties are equal: the same bytes of the same files in the same shape."""

    if TYPE_CHECKING:  # a field of some, computed by others

        @property
        def shape(self) -> tuple[int, ...]:
            """Of the whole tensor."""

    @abstractmethod
    def stored(self) -> Iterator[Stored]:
        """The stored tensors that it is made of."""

    @abstractmethod
    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Fill ``out``, of the box's shape, any dtype, device and strides. Collective: no."""


@dataclass(frozen=True)
class Stored(LazyTensor):
    """A tensor as it lies in a file.

    dtype:  the format's name for it, a key of ``DTYPES`` or one that torch has no dtype for (``F4``, ...)
    offset: of its first byte, from the beginning of the file
    """

    path: Path
    key: str = field(compare=False)
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def stored(self) -> Iterator[Stored]:
        yield self

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        reader.read(self.path, self.key, self.offset, self.shape, DTYPES[self.dtype], box, out)


@dataclass(frozen=True)
class _View(LazyTensor):
    """Elements of ``whole``."""

    whole: LazyTensor

    def stored(self) -> Iterator[Stored]:
        return self.whole.stored()


@dataclass(frozen=True)
class Narrowed(_View):
    """``whole.narrow(dim, start, length)``."""

    dim: int
    start: int
    length: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.whole.shape)
        shape[self.dim] = self.length
        return tuple(shape)

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        inside = box.with_range(self.dim, box.start[self.dim] + self.start, box.stop[self.dim] + self.start)
        self.whole.read(inside, out, reader)


@dataclass(frozen=True)
class Reordered(_View):
    """``whole`` with its dims in ``order``; None is a new dim of length 1. A dim that is not in ``order`` has length 1, and is dropped.

    Of shape (4, 1, 3), ``(2, None, 0)`` makes (3, 1, 4).
    """

    order: tuple[int | None, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else self.whole.shape[dim] for dim in self.order)

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        if box.numel == 0:
            return
        places = [self.order.index(dim) if dim in self.order else None for dim in range(len(self.whole.shape))]
        start = tuple(0 if place is None else box.start[place] for place in places)
        stop = tuple(1 if place is None else box.stop[place] for place in places)
        new = [place for place, dim in enumerate(self.order) if dim is None]
        seen = out.permute((*new, *(place for place in places if place is not None)))[(0,) * len(new)]
        for dim, place in enumerate(places):
            if place is None:
                seen = seen.unsqueeze(dim)
        self.whole.read(Box(start, stop), seen, reader)


# --- made of pieces ---------------------------------------------------------------------------------------------------------------


def dtype_of(lazy: LazyTensor) -> torch.dtype:
    """The dtype of its first stored part; pieces of one tensor have one dtype, which their assembler checks.

    Raises: CheckpointError if torch has no such dtype
    """
    part = next(lazy.stored())
    found = DTYPES.get(part.dtype)
    if found is None:
        raise failure(
            f"{part.path} has {part.key} in {part.dtype[:100]}",
            expected=", ".join(DTYPES),
            fix="convert it with a library that knows this dtype",
            file=part.path,
            key=part.key,
        )
    return found


@dataclass(frozen=True)
class Strided(LazyTensor):
    """``span.as_strided(shape, stride)``, the span being 1-D. Memory: the whole span while it is read."""

    span: Stored
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def stored(self) -> Iterator[Stored]:
        yield self.span

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        if box.numel == 0:
            return
        whole = torch.empty(self.span.shape, dtype=dtype_of(self.span), device="cpu")
        self.span.read(Box.whole(self.span.shape), whole, reader)
        out.copy_(whole.as_strided(self.shape, self.stride)[box.slices])


@dataclass(frozen=True)
class Signed(_View):
    """``whole``, negated ("neg" in ``bits``) or conjugated ("conj"): torch saves the base's elements and bits."""

    bits: frozenset[str]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        self.whole.read(box, out, reader)
        if "neg" in self.bits:
            out.neg_()
        if "conj" in self.bits:
            out.conj_physical_()


@dataclass(frozen=True)
class Assembled(LazyTensor):
    """A tensor made of boxes that cover each element once."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, LazyTensor], ...]

    def stored(self) -> Iterator[Stored]:
        for _, part in self.parts:
            yield from part.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        for place, part in self.parts:
            common = box.intersect(place)
            if common.numel > 0 or not self.shape:
                part.read(common.seen_from(place.start), out[common.seen_from(box.start).slices], reader)


def joined(parts: Sequence[LazyTensor], dim: int) -> Assembled:
    """``torch.cat(parts, dim)``; the parts have equal shapes except along ``dim``."""
    boxes, stop = [], 0
    for part in parts:
        start, stop = stop, stop + part.shape[dim]
        boxes.append((Box.whole(part.shape).with_range(dim, start, stop), part))
    return Assembled((*parts[0].shape[:dim], stop, *parts[0].shape[dim + 1 :]), tuple(boxes))


@dataclass(frozen=True)
class Flat(_View):
    """``whole.view(shape)`` of a 1-D tensor."""

    shape: tuple[int, ...]

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Whole rows are read in place; for a narrower box, bands of whole rows are read and it is taken from these."""
        if box.numel == 0:
            return
        row = Box((*box.start[:1], *[0] * (len(self.shape) - 1)), (*box.stop[:1], *self.shape[1:]))
        if row == box and out.is_contiguous():
            self._read_rows(box, out.view(-1), reader)
            return
        dtype = dtype_of(self)
        for band in split(row, max(BUFFER_NBYTES // dtype.itemsize, 1)):
            common = band.intersect(box)
            if common.numel > 0:
                values = torch.empty(band.shape, dtype=dtype, device="cpu")
                self._read_rows(band, values.view(-1), reader)
                out[common.seen_from(box.start).slices].copy_(values[common.seen_from(band.start).slices])

    def _read_rows(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Read ``box``, which is one run of elements."""
        first = sum(start * math.prod(self.shape[dim + 1 :]) for dim, start in enumerate(box.start))
        self.whole.read(Box((first,), (first + box.numel,)), out, reader)


def slice_of(parts: Sequence[LazyTensor], start: int, shape: tuple[int, ...]) -> Flat:
    """``cat(parts)[start : start + prod(shape)].view(shape)`` of 1-D parts."""
    begins = list(itertools.accumulate((part.shape[0] for part in parts), initial=0))
    stop = start + math.prod(shape)
    needed = [index for index in range(len(parts)) if begins[index + 1] > start and begins[index] < stop] or [0]
    whole = joined([parts[index] for index in needed], 0)
    return Flat(Narrowed(whole, 0, start - begins[needed[0]], stop - start), shape)


def tensors_of(state: Any, prefix: str = "") -> list[tuple[str, LazyTensor]]:
    """All lazy tensors in nested dicts and sequences, with their paths joined by dots."""
    if isinstance(state, LazyTensor):
        return [(prefix, state)]
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, (list, tuple)):
        items = list(enumerate(state))
    return [found for key, each in items for found in tensors_of(each, f"{prefix}.{key}" if prefix else str(key))]


def converted(lazy: LazyTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of ``lazy`` if floating-point tensors become ``dtype``; None: stay what they are."""
    own = dtype_of(lazy)
    return dtype if dtype is not None and own.is_floating_point else own


def nbytes_of(lazy: LazyTensor) -> int:
    return math.prod(lazy.shape) * dtype_of(lazy).itemsize
