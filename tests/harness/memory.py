"""How many bytes are in use: every storage that an operation touches, as long as it lives. Works on the CPU, without an allocator.

It knows tensors only. Bytes that several storages share (sharded parameters are views, with storages of their own, into a flat
shard) count once; storages are resized behind the dispatcher's back, so each is asked for its size again at each operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Piece = tuple[int, int]  # address and nbytes


class PeakBytes(TorchDispatchMode):
    """Inside, ``peak`` is the most bytes in use at a time so far, and ``at_peak`` what they were.

    Storages from before are counted from the first operation that touches them on; ``touch`` does it by hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.at_peak: list[Piece] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # let it unfold into operations on local tensors, which come back here
        result = func(*args, **(kwargs or {}))
        self.touch((args, kwargs, result))
        return result

    def touch(self, tree: Any) -> None:
        """Count the tensors in ``tree`` (of a DTensor, its local tensor), and look again at all that is known."""
        for value in tree_iter(tree):
            if isinstance(value, DTensor):
                value = value._local_tensor
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_meta:
                storage = value.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        pieces = self.now()
        total = covered_bytes(pieces)
        if total > self.peak:
            self.peak, self.at_peak = total, pieces

    def now(self) -> list[Piece]:
        """What is in use now."""
        alive = [(storage.data_ptr(), storage.nbytes()) for reference in self._storages.values() if (storage := reference())]
        return [piece for piece in alive if piece[1]]

    def reset(self) -> None:
        """Begin a new peak from what is in use now."""
        self.at_peak = self.now()
        self.peak = covered_bytes(self.at_peak)


def covered_bytes(pieces: Iterable[Piece]) -> int:
    """Size of the union: ``covered_bytes([(0, 8), (4, 8), (20, 4)]) == 16``."""
    total = end = 0
    for address, nbytes in sorted(pieces):
        total += max(address + nbytes - max(end, address), 0)
        end = max(end, address + nbytes)
    return total
