"""Tensors that are not sharded and still differ between ranks: each rank keeps its own.

Running means of a batch norm are an example: every rank sees its own batches. DCP takes a tensor that is not sharded from any rank.
Here the checkpoint has the lowest rank's value under the tensor's name, and beside it the values of the ranks that differ, which a load
uses only if as many ranks go on.
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
    """Digests of the plain tensors of ``state``, in host memory, by their path of keys, for ranks to compare."""
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
    """Undo ``take_per_rank_values`` on a loaded state, which may be the model's alone."""
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
