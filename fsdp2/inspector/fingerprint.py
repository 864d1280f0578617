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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Elements of this rank's part of a tensor.

    at:    where in the part; None: all of it
    first: the index in the whole tensor of the first one; the others follow. Or, where they do not, the whole tensor's shape
    """

    at: tuple[slice, ...] | None
    box: Box
    numel: int
    first: int | tuple[int, ...]


def runs_of(shape: Sequence[int], pieces: Iterable[Piece]) -> list[Run]:
    """What there is of a tensor of ``shape`` where a rank has ``pieces``; equal in all steps."""
    shape, runs = tuple(shape), []
    for piece in pieces:
        for box in split(piece.box, _CHUNK):
            start = (low - first + there for low, first, there in zip(box.start, piece.box.start, piece.at, strict=True))
            at = tuple(slice(low, low + length) for low, length in zip(start, box.shape, strict=True))
            rows = box.start[0] * math.prod(shape[1:]) if shape and box.shape[1:] == shape[1:] else shape
            runs.append(Run(at, box, box.numel, rows))
    is_all = len(runs) == 1 and not any(low.start for low in runs[0].at or ())
    return [replace(runs[0], at=None)] if is_all else runs


class Fingerprints:
    """Those of many parts of tensors, in few operators: 2**18 elements of one dtype are looked at together. Memory: about 40 MB.

    num_sketches: up to 36; of 16, a distance is good to a fifth
    """

    def __init__(self, num_sketches: int = NUM_SKETCHES) -> None:
        self._num_sketches = num_sketches
        self._num_parts = 0
        self._waiting: dict[tuple[torch.device, torch.dtype], _Batch] = {}
        self._sums: list[tuple[list[int], Tensor, Tensor]] = []

    @torch.no_grad()
    def take(self, parts: Iterable[tuple[Tensor, Iterable[Run]]]) -> None:
        """Parts as they are now, each with its runs: they may change after this."""
        for local, runs in parts:
            for run in runs:
                key = local.device, local.dtype
                batch = self._waiting.get(key)
                if batch is None or batch.numel + run.numel > _CHUNK:
                    if batch is not None:
                        self._sums.append(batch.sums(self._num_sketches))
                    batch = self._waiting[key] = _Batch()
                batch.numbers.append(self._num_parts)
                batch.runs.append(run)
                batch.values.append((local if run.at is None else local[run.at]).reshape(-1))
                batch.numel += run.numel
            self._num_parts += 1
        for batch in self._waiting.values():
            batch.copy()

    @torch.no_grad()
    def all(self) -> list[Fingerprint]:
        """In the order in which they were taken. Waits for the devices."""
        found: dict[int, Fingerprint] = {}
        for numbers, checksums, sums in [*self._sums, *(batch.sums(self._num_sketches) for batch in self._waiting.values())]:
            for number, checksum, (*sketch, squares) in zip(numbers, checksums.tolist(), sums.tolist(), strict=True):
                made = Fingerprint(checksum % _WORD, squares, tuple(sketch))
                found[number] = found[number] + made if number in found else made
        nothing = Fingerprint(0, 0.0, (0.0,) * self._num_sketches)
        return [found.get(number, nothing) for number in range(self._num_parts)]


class _Batch:
    """Runs of one dtype on one device, and their values: those that ``take`` has copied, and views of what it has been given since."""

    def __init__(self) -> None:
        self.numel = 0
        self.numbers: list[int] = []
        self.runs: list[Run] = []
        self.values: list[Tensor] = []
        self._num_copied = 0

    def copy(self) -> None:
        if views := self.values[self._num_copied :]:
            self.values[self._num_copied :] = [torch.cat(views)]
            self._num_copied = len(self.values)

    def sums(self, num_sketches: int) -> tuple[list[int], Tensor, Tensor]:
        """The numbers of its parts, and of each the checksum, and the sketch and the sum of the squares."""
        values = torch.cat(self.values)
        lengths = torch.tensor([run.numel for run in self.runs], device=values.device)
        owner = torch.repeat_interleave(torch.arange(len(self.runs), device=values.device), lengths, output_size=self.numel)
        mixed = _mixed(self._indices(owner))
        bits = values.view(_BITS[values.element_size()]).to(torch.int64)
        checksums = torch.zeros_like(lengths).index_add_(0, owner, _mixed((bits + 1) * (mixed | 1)))
        wide = values.to(torch.float64)
        shifts = torch.arange(num_sketches, device=values.device).unsqueeze(1) * (36 // num_sketches) + 11
        summands = torch.cat([(((mixed >> shifts) & 1) * 2 - 1) * wide, wide.square().unsqueeze(0)])
        sums = torch.zeros(len(self.runs), num_sketches + 1, dtype=torch.float64, device=values.device)
        return self.numbers, checksums, sums.index_add_(0, owner, summands.t())

    def _indices(self, owner: Tensor) -> Tensor:
        """Of each value, the index of its element in the whole tensor, as that is laid out row by row."""
        ahead, at, odd = [], 0, []
        for run in self.runs:
            ahead.append(run.first - at if isinstance(run.first, int) else 0)
            if not isinstance(run.first, int):
                odd.append((at, run.first, run.box))
            at += run.numel
        indices = torch.arange(at, device=owner.device) + torch.tensor(ahead, device=owner.device)[owner]
        for at, shape, box in odd:
            indices[at : at + box.numel] = _indices_in(shape, box, owner.device)
        return indices


def _indices_in(shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
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
