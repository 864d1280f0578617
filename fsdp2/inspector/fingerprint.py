"""A fingerprint tells later whether another run had the same tensor: a checksum of its bits, and a sketch of its values.

Both are sums over the elements, of functions of an element's index in the whole tensor and of its value. So each rank sums up its own
shard, and the sum over all ranks is that of the whole tensor, however it was cut. This file refuses to know ranks.

    checksum   mod 2**64, of each element's bits mixed with its index: equal bits, equal checksum; one other bit anywhere, another one
    sketch     four sums of x[i] times a random sign of i. Of the difference d of two tensors, the sketches' difference is a sketch, and
               its mean square is |d|^2 on average (Alon, Matias, Szegedy 1996). A norm alone would not do: one wrong value of a million
               moves it by less than rounding does

Worked example: [1, 2, 3, 4] cut into [1, 2] and [3, 4]: the checksums of both, of indices 0, 1 and 2, 3, add up to that of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..checkpoint.boxes import Box, Piece, split

NUM_SKETCHES = 4
_WORD = 1 << 64
_CHUNK = 1 << 20
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


@torch.no_grad()
def fingerprint(local: Tensor, shape: Sequence[int], pieces: Iterable[Piece]) -> Fingerprint:
    """The fingerprint of this rank's part of a tensor of ``shape``. Waits for the device. Memory: a few MB."""
    boxes = [(piece, box) for piece in pieces for box in split(piece.box, _CHUNK)]
    return reduce(Fingerprint.__add__, (_of_box(local, shape, piece, box) for piece, box in boxes), NOTHING)


def _of_box(local: Tensor, shape: Sequence[int], piece: Piece, box: Box) -> Fingerprint:
    at = tuple(start - first + there for start, first, there in zip(box.start, piece.box.start, piece.at, strict=True))
    values = local[tuple(slice(start, start + length) for start, length in zip(at, box.shape, strict=True))].reshape(-1)
    if values.numel() == 0:
        return NOTHING
    mixed = _mixed(_indices(shape, box, values.device))
    bits = values.view(_BITS[values.element_size()]).to(torch.int64)
    checksum = _mixed((bits + 1) * (mixed | 1)).sum()
    wide = values.to(torch.float64)
    signs = torch.stack([((mixed >> (11 + 9 * k)) & 1) * 2 - 1 for k in range(NUM_SKETCHES)]).to(torch.float64)
    sums = torch.cat([(signs * wide).sum(dim=1), wide.square().sum().reshape(1)]).tolist()
    return Fingerprint(int(checksum.item()) % _WORD, sums[-1], tuple(sums[:-1]))


def _indices(shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """The indices of the elements of ``box`` in the whole tensor, as it is laid out row by row."""
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
