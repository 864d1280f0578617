"""This rank's part of tensors, sharded or whole: its values, where they lie in the whole tensor, and their fingerprints."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..checkpoint.model_tensors import cuts_of
from ..checkpoint.shard_geometry import Piece, pieces_of
from ..inspector.fingerprint import Fingerprint, Fingerprints, runs_of
from ..torch_names import torch_dtensors

NUM_SKETCHES = 16


@dataclass(frozen=True)
class Seen:
    """A rank's part of a tensor.

    copy: the lowest rank that has a part of the same copy
    eps:  the coarsest rounding unit that it went through
    """

    made: Fingerprint
    copy: int
    numel: int
    eps: float
    dtype_eps: float

    def distance(self, other: Seen | None) -> float:
        """About the norm of the difference; 0 if there is no other."""
        return self.made.distance(other.made) if other is not None else 0.0


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def local_of(tensor: Tensor) -> Tensor:
    return torch_dtensors.waited_for(torch_dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Seen]:
    found = [(name, tensor, *placed(tensor)) for name, tensor in tensors]
    made = Fingerprints(NUM_SKETCHES)
    made.take((local_of(tensor), runs_of(tensor.shape, pieces)) for _, tensor, _, pieces in found)
    seen = zip(found, made.all(), strict=True)
    return {name: Seen(each, copy, tensor.numel(), 0.0, eps_of(tensor.dtype)) for (name, tensor, copy, _), each in seen}


@functools.lru_cache
def eps_of(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def placed(tensor: Tensor) -> tuple[int, list[Piece]]:
    """The lowest rank that holds a part of this rank's copy, and the pieces that it holds."""
    if not isinstance(tensor, DTensor):
        return int(os.environ["RANK"]), pieces_of(tensor.shape, ())
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    first = tuple(
        0 if torch_dtensors.shard_dim(each) is not None else here for each, here in zip(tensor.placements, coordinate, strict=True)
    )
    return int(mesh.mesh[first]), pieces_of(tensor.shape, cuts_of(tensor, coordinate))


def copy_into(values: Tensor, pieces: list[Piece], to: Tensor) -> None:
    """Give ``to`` the elements that both have."""
    for piece in pieces:
        for own in placed(to)[1]:
            both = piece.box.intersect(own.box)
            if both.numel:
                given = values[piece.local.slices][both.seen_from(piece.box.start).slices]
                local_of(to)[own.local.slices][both.seen_from(own.box.start).slices] = given.to(to.dtype)


__all__ = ["Seen", "copy_into", "eps_of", "fingerprints", "local_of", "placed", "plain_name"]
