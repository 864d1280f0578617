"""Lazy tensors read in bands, one at a time, for a writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..boxes import Box, split
from ..byte_ranges import ByteReader
from ..lazy import LazyTensor
from ..readers.lazy_pieces import dtype_of

BAND_NBYTES = 64 << 20


@dataclass(frozen=True)
class Stream:
    """How tensors are read; ``advance`` is told the bytes that are done.

    dtype: what floating-point tensors of the model become; None: what they are
    """

    reader: ByteReader
    advance: Callable[[int], None]
    dtype: torch.dtype | None = None

    def bands(self, lazy: LazyTensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """All elements in order, in ``dtype``, at most BAND_NBYTES at a time; none of an empty tensor."""
        for box in bands_of(lazy.shape, dtype):
            yield self.band(lazy, box, dtype)

    def band(self, lazy: LazyTensor, box: Box, dtype: torch.dtype) -> Tensor:
        values = torch.empty(box.shape, dtype=dtype, device="cpu")
        lazy.read(box, values, self.reader)
        self.advance(values.nbytes)
        return values


def bands_of(shape: tuple[int, ...], dtype: torch.dtype, fraction: int = 1) -> Iterator[Box]:
    """Boxes of at most BAND_NBYTES / ``fraction``."""
    return split(Box.whole(shape), BAND_NBYTES // fraction // dtype.itemsize)


def converted(lazy: LazyTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that it gets."""
    own = dtype_of(lazy)
    return dtype if dtype is not None and own.is_floating_point else own
