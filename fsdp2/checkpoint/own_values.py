"""Tensors that are not sharded, and yet not the same on every rank: each rank's own are kept.

Running means of a batch norm are such: every rank sees its own batches. DCP takes what is not sharded from any rank. Here the value of
the lowest rank is what the checkpoint has under its name, and ranks that differ from it keep their own beside it, which only matters
if as many ranks go on from it. It refuses to know what the values are.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .every_rank import of_every_rank, on_every_rank

Path = tuple[Any, ...]


def take_own_values(state: dict[str, Any], process_group: dist.ProcessGroup | None, what: str) -> dict[Path, Tensor]:
    """Take out of ``state`` the plain tensors, in host memory, that differ from those of the lowest rank that has them.

    Returns:    them, by their path of keys; empty on the lowest rank
    Collective: yes, over ``process_group``
    Raises:     on every rank, what went wrong on one
    """
    digests: dict[Path, bytes] = {}

    def digest() -> dict[Path, bytes]:
        digests.update({path: _digest(tensor) for path, tensor in _plain_tensors(state, ()).items()})
        return digests

    of_ranks = of_every_rank(process_group, what, digest)
    return on_every_rank(process_group, what, lambda: _taken(state, digests, of_ranks))


def _taken(state: dict[str, Any], digests: dict[Path, bytes], of_ranks: list[dict[Path, bytes]]) -> dict[Path, Tensor]:
    first: dict[Path, bytes] = {}
    for each in of_ranks:
        for path, digest in each.items():
            first.setdefault(path, digest)
    own: dict[Path, Tensor] = {}
    for path in [path for path, digest in digests.items() if digest != first[path]]:
        into = state
        for key in path[:-1]:
            into = into[key]
        own[path] = into.pop(path[-1])
    return own


def put_own_values(state: dict[str, Any], own: dict[Path, Tensor]) -> None:
    """Undo ``take_own_values`` on what has been loaded, which may be the model's state alone."""
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
