"""What a test body computed, so that the same body can be held against itself on another device, bit for bit.

``fed_own_chunk`` and its neighbors in ``training.py`` hand every loss, gradient and value here. Nothing is kept unless a test on
ranks is run for comparison; then ``worker.py`` asks for fingerprints when the body is done.

    with kept() as results:
        body()
    results.fingerprints()   # [("loss of step 0", "9f86d0..."), ...]
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Fingerprints = list[tuple[str, str]]


class Results:
    def __init__(self) -> None:
        self._noted: list[tuple[str, Tensor | None]] = []

    def note(self, what: str, tensor: Tensor | None) -> None:
        self._noted.append((what, tensor))

    def fingerprints(self) -> Fingerprints:
        """Waits for the device, here alone: asking earlier would order what the body has not."""
        return [(what, "none" if tensor is None else _fingerprint(tensor)) for what, tensor in self._noted]


_kept: list[Results] = []


@contextlib.contextmanager
def kept() -> Iterator[Results]:
    """Inside, what is noted is kept."""
    _kept.append(Results())
    try:
        yield _kept[-1]
    finally:
        _kept.pop()


def are_kept() -> bool:
    """Whether the body that runs is compared between devices."""
    return len(_kept) > 0


def note(what: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Keep ``tensors``, which nobody may write any more, if this body's results are kept."""
    if _kept:
        for name, tensor in tensors.items():
            _kept[-1].note(f"{what} {name}".rstrip(), tensor)


def first_difference(ours: Fingerprints, theirs: Fingerprints) -> str | None:
    """The first thing that is not the same in both, by name; None if all are."""
    for index in range(max(len(ours), len(theirs))):
        here, there = ([*each, None][min(index, len(each))] for each in (ours, theirs))
        if here != there:
            return f"result {index}: {here and here[0]}, there {there and there[0]}"
    return None


def _fingerprint(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for plain in _plain(tensor):
        digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.contiguous().flatten().view(torch.uint8).numpy().tobytes() if plain.numel() > 0 else b"")
    return digest.hexdigest()[:16]


@torch.no_grad()
def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors on the host of which it is made: the local one of a DTensor, the inner ones of a subclass."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach().cpu()
        return
    for name in flatten()[0]:
        yield from _plain(getattr(tensor, name))


__all__ = ["Fingerprints", "are_kept", "first_difference", "kept", "note"]
