"""Tensors of a checkpoint that are not read yet: stored ones, and combinations of them.

A lazy tensor has a shape and reads any box of itself. So a rank that keeps rows [6, 8) of a fused weight reads just these, from
the stored tensors that have them.

Worked example: ``Joined((q, k), dim=0)`` of (4, 8) and (2, 8) has shape (6, 8); its rows [3, 5) are row 3 of q and row 0 of k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .boxes import Box
from .byte_ranges import ByteReader
from .safetensors_format import DTYPES, Entry


class LazyTensor(ABC):
    """A tensor to be read in parts.

    shape: of the whole tensor
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @abstractmethod
    def stored(self) -> Iterator[Stored]:
        """The stored tensors that it is made of."""

    @abstractmethod
    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Fill ``out``, of the box's shape, any dtype, device and strides. Collective: no."""


@dataclass(frozen=True, eq=False)
class Stored(LazyTensor):
    """A tensor as it lies in a file."""

    path: Path
    key: str
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def stored(self) -> Iterator[Stored]:
        yield self

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        reader.read(self.path, self.key, self.entry.offset, self.shape, DTYPES[self.entry.dtype], box, out)


@dataclass(frozen=True, eq=False)
class Joined(LazyTensor):
    """``torch.cat(parts, dim)``; the parts have equal shapes but for ``dim``."""

    parts: tuple[LazyTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def stored(self) -> Iterator[Stored]:
        for part in self.parts:
            yield from part.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        origin = [0] * len(box.start)
        for part in self.parts:
            size = part.shape[self.dim]
            place = Box.whole(self.shape).with_range(self.dim, origin[self.dim], origin[self.dim] + size)
            common = box.intersect(place)
            if common.numel > 0:
                part.read(common.seen_from(origin), out[common.seen_from(box.start).slices], reader)
            origin[self.dim] += size


@dataclass(frozen=True, eq=False)
class Narrowed(LazyTensor):
    """``whole.narrow(dim, start, length)``."""

    whole: LazyTensor
    dim: int
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.whole.shape)
        shape[self.dim] = self.length
        return tuple(shape)

    def stored(self) -> Iterator[Stored]:
        return self.whole.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        inside = box.with_range(self.dim, box.start[self.dim] + self.start, box.stop[self.dim] + self.start)
        self.whole.read(inside, out, reader)


@dataclass(frozen=True, eq=False)
class Permuted(LazyTensor):
    """``whole.permute(order)``."""

    whole: LazyTensor
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape[dim] for dim in self.order)

    def stored(self) -> Iterator[Stored]:
        return self.whole.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        back = [self.order.index(dim) for dim in range(len(self.order))]
        inside = Box(tuple(box.start[dim] for dim in back), tuple(box.stop[dim] for dim in back))
        self.whole.read(inside, out.permute(back), reader)


@dataclass(frozen=True, eq=False)
class Unsqueezed(LazyTensor):
    """``whole.unsqueeze(dim)``."""

    whole: LazyTensor
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.whole.shape[: self.dim], 1, *self.whole.shape[self.dim :])

    def stored(self) -> Iterator[Stored]:
        return self.whole.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        inside = Box((*box.start[: self.dim], *box.start[self.dim + 1 :]), (*box.stop[: self.dim], *box.stop[self.dim + 1 :]))
        self.whole.read(inside, out.squeeze(self.dim), reader)


@dataclass(frozen=True, eq=False)
class Squeezed(LazyTensor):
    """``whole.squeeze(dim)``, of length 1 there."""

    whole: LazyTensor
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.whole.shape[: self.dim], *self.whole.shape[self.dim + 1 :])

    def stored(self) -> Iterator[Stored]:
        return self.whole.stored()

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        start, stop = box.start, box.stop
        inside = Box((*start[: self.dim], 0, *start[self.dim :]), (*stop[: self.dim], 1, *stop[self.dim :]))
        self.whole.read(inside, out.unsqueeze(self.dim), reader)
