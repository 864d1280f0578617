"""Tensors that are not sharded, and yet not the same on every rank: each rank's own are kept.

Running means of a batch norm are such: every rank sees its own batches. DCP takes what is not sharded from any rank. Here the value of
the lowest rank is what the checkpoint has under its name, and ranks that differ from it keep their own beside it, which only matters
if as many ranks go on from it. This file refuses to know what the values are, and how ranks talk.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

Path = tuple[Any, ...]


def value_digests(state: dict[str, Any]) -> dict[Path, bytes]:
    """Of the plain tensors of ``state``, in host memory, by their path of keys: what ranks have to tell each other."""
    return {path: _digest(tensor) for path, tensor in _plain_tensors(state, ()).items()}


def take_per_rank_values(state: dict[str, Any], of_ranks: Sequence[dict[Path, bytes]], rank: int) -> dict[Path, Tensor]:
    """Take out of ``state`` the tensors that differ from those of the lowest rank that has them; none on that rank itself.

    of_ranks: what ``value_digests`` gave on every rank
    rank:     this one
    """
    first: dict[Path, bytes] = {}
    for each in of_ranks:
        for path, digest in each.items():
            first.setdefault(path, digest)
    own: dict[Path, Tensor] = {}
    for path in [path for path, digest in of_ranks[rank].items() if digest != first[path]]:
        into = state
        for key in path[:-1]:
            into = into[key]
        own[path] = into.pop(path[-1])
    return own


def put_per_rank_values(state: dict[str, Any], own: dict[Path, Tensor]) -> None:
    """Undo ``take_per_rank_values`` on what has been loaded, which may be the model's state alone."""
    for path, tensor in own.items():
        if path[0] not in state:
            continue
        into = state
        for key in path[:-1]:
            into = into[key]
        into[path[-1]] = tensor


def _plain_tensors(state: Any, path: Path) -> dict[Path, Tensor]:
    if isinstance(state, dict):
        return {found: each for key, value in state.items() for found, each in _plain_tensors(value, (*path, key)).items()}
    return {path: state} if isinstance(state, Tensor) and not isinstance(state, DTensor) else {}


def _digest(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()
    nbytes = tensor.numel() * tensor.itemsize
    content = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else b""
    return hashlib.sha256(content).digest() + f"{tensor.dtype} {tuple(tensor.shape)}".encode()
