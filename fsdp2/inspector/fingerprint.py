"""A fingerprint tells later whether another run had the same tensor: a checksum of its bits, and a sketch of its values.

Both are sums over the elements, of functions of an element's index in the whole tensor and of its value. So each rank sums up its own
shard, and the sum over all ranks is that of the whole tensor, however it was cut.

    checksum   mod 2**64, of each element's bits mixed with its index: equal bits, equal checksum; one other bit anywhere, another one
    sketch     four sums of x[i] times a random sign of i. Of the difference d of two tensors, the sketches' difference is a sketch, and
               its mean square is |d|^2 on average (Alon, Matias, Szegedy 1996). A norm alone would not do: one wrong value of a million
               moves it by less than rounding does

Worked example: [1, 2, 3, 4] cut into [1, 2] and [3, 4]: the checksums of both, of indices 0, 1 and 2, 3, add up to that of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.shard_geometry import Box, Piece, split

NUM_SKETCHES = 4
_WORD = 1 << 64
_CHUNK = 1 << 18
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """squares: the sum of all values' squares"""

    checksum: int
    squares: float
    sketch: tuple[float, ...]

    def __add__(self, other: Fingerprint) -> Fingerprint:
        sketch = tuple(a + b for a, b in zip(self.sketch, other.sketch, strict=True))
        return Fingerprint((self.checksum + other.checksum) % _WORD, self.squares + other.squares, sketch)

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    def distance(self, other: Fingerprint) -> float:
        """About the norm of the difference."""
        return math.dist(self.sketch, other.sketch) / math.sqrt(len(self.sketch))


NOTHING = Fingerprint(0, 0.0, (0.0,) * NUM_SKETCHES)


Part = tuple[Tensor, Sequence[int], Iterable[Piece]]
"""This rank's part of a tensor, the whole tensor's shape, and which pieces of it the part has."""


def fingerprint(local: Tensor, shape: Sequence[int], pieces: Iterable[Piece]) -> Fingerprint:
    """The fingerprint of this rank's part of a tensor of ``shape``. Waits for the device. Memory: about 40 MB."""
    return fingerprints([(local, shape, pieces)])[0]


@torch.no_grad()
def fingerprints(parts: Sequence[Part], num_sketches: int = NUM_SKETCHES) -> list[Fingerprint]:
    """Those of many parts, in few operators: small ones are looked at together. Waits for the device once for each 2**18 elements.

    num_sketches: up to 36; of 16, a distance is good to a fifth
    """
    found = [Fingerprint(0, 0.0, (0.0,) * num_sketches)] * len(parts)
    waiting: dict[tuple[torch.device, torch.dtype], _Batch] = {}
    for number, (local, shape, pieces) in enumerate(parts):
        key = local.device, local.dtype
        for piece in pieces:
            for box, extent, numel in _boxes(piece.box):
                if key in waiting and waiting[key].numel + numel > _CHUNK:
                    waiting.pop(key).add_to(found, num_sketches)
                waiting.setdefault(key, _Batch()).take(
                    number, _values(local, piece, box, extent), _indices(shape, box, extent, local.device)
                )
    for batch in waiting.values():
        batch.add_to(found, num_sketches)
    return found


@functools.lru_cache(maxsize=4096)  # of two steps the same
def _boxes(box: Box) -> list[tuple[Box, tuple[int, ...], int]]:
    return [(each, each.shape, each.numel) for each in split(box, _CHUNK)]


class _Batch:
    """Values of one dtype on one device, with their indices in the whole tensors, and the numbers of their parts."""

    def __init__(self) -> None:
        self.numel = 0
        self._numbers: list[int] = []
        self._values: list[Tensor] = []
        self._indices: list[Tensor] = []

    def take(self, number: int, values: Tensor, indices: Tensor) -> None:
        self.numel += values.numel()
        self._numbers.append(number)
        self._values.append(values)
        self._indices.append(indices)

    def add_to(self, found: list[Fingerprint], num_sketches: int) -> None:
        """Add their fingerprints to those of their parts."""
        for number, made in zip(self._numbers, _made(self._values, self._indices, num_sketches), strict=True):
            found[number] += made


def _made(values: Sequence[Tensor], indices: Sequence[Tensor], num_sketches: int) -> Iterator[Fingerprint]:
    """Of each of ``values``."""
    joined, mixed = torch.cat(list(values)), _mixed(torch.cat(list(indices)))
    lengths = torch.tensor([each.numel() for each in values], device=joined.device)
    owner = torch.repeat_interleave(torch.arange(len(values), device=joined.device), lengths, output_size=joined.numel())
    bits = joined.view(_BITS[joined.element_size()]).to(torch.int64)
    checksums = torch.zeros_like(lengths).index_add_(0, owner, _mixed((bits + 1) * (mixed | 1)))
    wide = joined.to(torch.float64)
    shifts = torch.arange(num_sketches, device=joined.device).unsqueeze(1) * (36 // num_sketches) + 11
    summands = torch.cat([(((mixed >> shifts) & 1) * 2 - 1) * wide, wide.square().unsqueeze(0)])
    sums = torch.zeros(num_sketches + 1, len(values), dtype=torch.float64, device=joined.device).index_add_(1, owner, summands)
    for checksum, (*sketch, squares) in zip(checksums.tolist(), sums.t().tolist(), strict=True):
        yield Fingerprint(checksum % _WORD, squares, tuple(sketch))


def _values(local: Tensor, piece: Piece, box: Box, extent: tuple[int, ...]) -> Tensor:
    if local.shape == extent:
        return local.reshape(-1)
    at = tuple(start - first + there for start, first, there in zip(box.start, piece.box.start, piece.at, strict=True))
    return local[tuple(slice(start, start + length) for start, length in zip(at, extent, strict=True))].reshape(-1)


def _indices(shape: Sequence[int], box: Box, extent: tuple[int, ...], device: torch.device) -> Tensor:
    """The indices of the elements of ``box`` in the whole tensor, as it is laid out row by row."""
    if shape and extent[1:] == tuple(shape[1:]):  # whole rows: one after another
        row = math.prod(shape[1:])
        return torch.arange(box.start[0] * row, box.stop[0] * row, device=device)
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        indices = indices.unsqueeze(-1) + torch.arange(start, stop, device=device) * stride
    return indices.reshape(-1)


def _mixed(words: Tensor) -> Tensor:
    """Each bit of the result hangs on all bits of the word; int64, which wraps (Steele et al. 2014, SplitMix64)."""
    words = (words ^ (words >> 30)) * -4658895280553007687
    words = (words ^ (words >> 27)) * -7723592293110705685
    return words ^ (words >> 31)
