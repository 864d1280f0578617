"""From the pieces of all ranks one after another, as collectives move them, to the whole tensor, and back.

The pieces of a tensor that is cut along dim 0 are the whole, one after another.

Worked example, a (2, 5) tensor cut along dim 1 over 2 ranks, into (2, 3) and (2, 2):

    whole     [[a b c d e], [f g h i j]]
    slots     [a b c f g h] and [d e i j . .]: padding lies after a rank's piece
    padded    [a b c f g h] and [d e . i j .]: each piece has the shape of the largest
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..plan.layout import Cut


def assemble(slots: Tensor, cut: Cut, whole: Tensor, padded: bool = False) -> None:
    """Join the slots of all ranks, (num_shards, slot_numel), to the physical tensor ``whole`` of ``cut.shape``.

    padded: the last piece has the largest one's shape, and zeros among its elements; else they come after its elements
    """
    for piece, region in _regions(slots, cut, whole, padded):
        region.copy_(piece)


def disassemble(whole: Tensor, cut: Cut) -> Tensor:
    """The reverse: (num_shards, slot_numel) with the piece of each rank, padded with zeros."""
    if cut.dim is None:
        # Contiguous: ``chunk_cat`` copies other tensors piece by piece.
        return whole.reshape(1, -1).repeat(cut.num_shards, 1)
    if cut.is_row_major:
        return F.pad(whole.reshape(-1), (0, cut.num_shards * cut.slot_numel - cut.numel)).view(cut.num_shards, -1)
    is_even = cut.shape[cut.dim] % cut.num_shards == 0
    slots = (whole.new_empty if is_even else whole.new_zeros)(cut.num_shards, cut.slot_numel)
    for piece, region in _regions(slots, cut, whole):
        piece.copy_(region)
    return slots


def _regions(slots: Tensor, cut: Cut, whole: Tensor, padded: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Pairs of views of ``slots`` and ``whole`` that hold the same elements: at most two, however many ranks there are.

    ``torch.chunk`` gives the first ranks equally many rows, at most one rank fewer, and the others none.
    """
    dim, shape = cut.dim, cut.shard_shape(0)
    assert dim is not None
    rows = shape[dim]
    full = cut.shape[dim] // rows if rows > 0 else 0
    left = cut.shape[dim] - full * rows
    regions = []
    if full > 0:
        pieces = slots[:full].view(full, *shape).movedim(0, dim)
        places = whole.narrow(dim, 0, full * rows).view(*whole.shape[:dim], full, rows, *whole.shape[dim + 1 :])
        regions.append((pieces, places))
    if left > 0:
        region = whole.narrow(dim, full * rows, left)
        last = (
            slots[full].view(shape).narrow(dim, 0, left) if padded else slots[full, : region.numel()].view(region.shape)
        )
        regions.append((last, region))
    return regions
