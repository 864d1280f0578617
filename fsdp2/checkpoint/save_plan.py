"""Which tensor goes into which file, who writes it, and in which pieces it gets there: decided from names, shapes and dtypes alone.

Every rank makes the same plan. It refuses to know values, folders and collectives.

Worked example, three fp32 tensors of 400, 800 and 400 bytes and max_shard_size 1000:

    model-00001-of-00003.safetensors has the first, -00002 the second (1200 would be too much), -00003 the third
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import ArgumentError, message
from .boxes import Box, split
from .failure import failure
from .model_tensors import ModelTensor
from .safetensors_format import NAMES, build_header

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor to be written whole, as ``key``, in ``dtype``."""

    source: ModelTensor
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Band:
    """A part of a tensor whose elements lie one after another in the file."""

    tensor: PlannedTensor
    box: Box


@dataclass(frozen=True)
class PlannedFile:
    """One file: its tensors in their order in it, its header, and the rank (of the process group) that writes it."""

    tensors: tuple[PlannedTensor, ...]
    header: bytes
    writer: int

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def bands(self, max_nbytes: int) -> Iterator[Band]:
        """All bytes behind the header, in order."""
        for tensor in self.tensors:
            for box in split(Box.whole(tensor.shape), max_nbytes // tensor.dtype.itemsize):
                yield Band(tensor, box)


def plan_files(
    tensors: Iterable[ModelTensor], max_shard_nbytes: int, writers: Sequence[int], dtype: torch.dtype | None
) -> list[PlannedFile]:
    """Fill files in the model's order, as transformers does; a tensor larger than ``max_shard_nbytes`` gets one of its own.

    dtype: for floating-point tensors; None: their own
    Raises: CheckpointError naming tensors of a dtype that the format does not have
    """
    planned = [_planned(each, dtype) for each in tensors if each.persistent]
    unknown = [f"{tensor.key}: {tensor.dtype}" for tensor in planned if tensor.dtype not in NAMES]
    if unknown:
        raise failure(
            f"{len(unknown)} tensors have a dtype that safetensors files do not know",
            items=unknown,
            expected=", ".join(str(each).removeprefix("torch.") for each in NAMES),
            fix="convert them; nothing was written",
            key=unknown[0].partition(":")[0],
        )
    contents: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in planned:
        if contents[-1] and filled + tensor.nbytes > max_shard_nbytes:
            contents.append([])
            filled = 0
        contents[-1].append(tensor)
        filled += tensor.nbytes
    files = []
    for index, content in enumerate(contents):
        content.sort(key=lambda tensor: -tensor.dtype.itemsize)  # each then begins at a multiple of its itemsize
        header = build_header(((tensor.key, tensor.dtype, tensor.shape) for tensor in content), {"format": "pt"})
        files.append(PlannedFile(tuple(content), header, writers[index % len(writers)]))
    return files


def _planned(each: ModelTensor, dtype: torch.dtype | None) -> PlannedTensor:
    tensor = each.tensor
    convert = dtype is not None and tensor.is_floating_point()
    return PlannedTensor(each, each.name, tuple(tensor.shape), dtype if convert and dtype is not None else tensor.dtype)


def fingerprint(files: Iterable[PlannedFile]) -> str:
    """Equal on two ranks only if they made the same plan."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.writer.to_bytes(8, "little") + file.header)
    return digest.hexdigest()


def writers_of(world_size: int, num_writers: int | None) -> list[int]:
    """``num_writers`` of ``world_size`` ranks, spread out evenly, rank 0 among them: ``writers_of(8, 2) == [0, 4]``."""
    count = world_size if num_writers is None else min(num_writers, world_size)
    return [index * world_size // count for index in range(count)]


def nbytes_of(size: int | str) -> int:
    """``nbytes_of("5GB") == 5 * 10**9``, ``nbytes_of("1.5 MiB") == 1572864``. Raises: ArgumentError"""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Z]*)", str(size).strip().upper())
    unit = _UNITS.get(match[2]) if match else None
    nbytes = int(float(match[1]) * unit) if match and unit is not None and type(size) in (int, str) else 0
    if nbytes <= 0:
        raise ArgumentError(
            message(f"max_shard_size is {size!r}", expected='a positive number of bytes, or text like "5GB" or "512MiB"', fix='"5GB"')
        )
    return nbytes
