"""Tensors of a model as lazy ones: the result of a key map is known before any value moves.

Reading such a tensor tells which boxes of which parameters would have to go where; ``bands.py`` moves them.

Worked example: with ``Split`` of a fused (6, 8) parameter into k of rows [4, 6), the whole of k wants rows [4, 6) of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .boxes import Box
from .byte_ranges import ByteReader
from .lazy import LazyTensor, Stored
from .model_tensors import ModelTensor
from .safetensors_format import NAMES, Entry


class Wanted(ByteReader):
    """Notes what would be read.

    parts: a parameter, a box of it, and the view of that box's shape that it should fill
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[ModelTensor, Box, Tensor]] = []


@dataclass(frozen=True, eq=False)
class LazyParameter(LazyTensor):
    """A parameter or buffer, whole."""

    source: ModelTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.tensor.shape)

    def stored(self) -> Iterator[Stored]:
        """The tensor as a file would have it, with its dtype, for messages."""
        dtype = self.source.tensor.dtype
        yield Stored(Path(), self.source.name, Entry(NAMES.get(dtype, str(dtype)), self.shape, 0, 0))

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        assert isinstance(reader, Wanted), "values of a model are brought by bands.py"
        reader.parts.append((self.source, box, out))


def wanted(lazy: LazyTensor, box: Box, out: Tensor) -> list[tuple[ModelTensor, Box, Tensor]]:
    """The parts that make up ``box`` of ``lazy``, and each one's place in ``out``, of the box's shape. Collective: no."""
    reader = Wanted()
    lazy.read(box, out, reader)
    return reader.parts
