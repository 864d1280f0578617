"""The file that each tensor goes into, the rank that writes it, and its pieces: decided from names, shapes and dtypes alone.

Every rank makes the same plan.

Worked example, three fp32 tensors of 400, 800 and 400 bytes and max_shard_size 1000:

    model-00001-of-00003.safetensors has the first, -00002 the second (1200 would be too much), -00003 the third
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ArgumentError
from .failures import failure
from .key_map import KeyMap, Tensors, apply_key_map, inverted
from .lazy_tensors import DTYPES, NAMES, LazyTensor, converted
from .model_tensors import LazyParameter, ModelTensor
from .safetensors_files import build_header
from .shard_geometry import Box, split

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor to be written whole, as ``key``, in ``dtype``."""

    lazy: LazyTensor
    key: str
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lazy.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bands(self, max_nbytes: int) -> Iterator[Band]:
        """The bands of all of it, in order."""
        for box in split(Box.whole(self.shape), max_nbytes // self.dtype.itemsize):
            yield Band(self, box)


@dataclass(frozen=True)
class Band:
    """A part of a tensor whose elements lie one after another in the file."""

    tensor: PlannedTensor
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.tensor.dtype.itemsize


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
        """All bytes after the header, in order."""
        for tensor in self.tensors:
            yield from tensor.bands(max_nbytes)


def written_tensors(tensors: Iterable[ModelTensor], key_map: KeyMap | None) -> Tensors:
    """The tensors to write, by their names in the checkpoint.

    key_map: as for loading; its rules are undone
    Raises:  ArgumentError for a rule that cannot be; CheckpointError if loading with ``key_map`` would not give these tensors again
    """
    kept: Tensors = {each.name: LazyParameter(each) for each in tensors}
    written = apply_key_map(kept, {}, inverted(key_map))
    shapes = {name: each.shape for name, each in kept.items()}
    again = {name: each.shape for name, each in apply_key_map(written, shapes, key_map).items()}
    if again != shapes:
        names = sorted(name for name in shapes.keys() | again.keys() if shapes.get(name) != again.get(name))
        differing = {name: f"{shapes.get(name, 'not')} in the model, {again.get(name, 'not')} loaded again" for name in names}
        raise failure(
            f"key_map would not turn the written checkpoint back into {len(differing)} of the model's tensors",
            problems=differing,
            expected="rules whose inverse undoes them for every name of the model",
            fix="fix key_map; nothing was written",
        )
    return written


def plan_files(
    tensors: Mapping[str, LazyTensor], max_shard_nbytes: int, writers: Sequence[int], dtype: torch.dtype | None
) -> list[PlannedFile]:
    """Fill files in the order of ``tensors``, as transformers does; a tensor larger than ``max_shard_nbytes`` gets one of its own.

    dtype: for floating-point tensors; None: their own
    Raises: CheckpointError naming tensors of a dtype that the format does not have
    """
    dtypes = {key: list(dict.fromkeys(stored.dtype for stored in lazy.stored())) for key, lazy in tensors.items()}
    unknown = {key: ", ".join(names) for key, names in dtypes.items() if not DTYPES.keys() >= set(names) or len(names) > 1}
    if unknown:
        raise failure(
            f"{len(unknown)} tensors have a dtype that safetensors files cannot hold, or parts of several dtypes",
            problems=unknown,
            expected=", ".join(str(each).removeprefix("torch.") for each in NAMES),
            fix="convert them; nothing was written",
        )
    planned = (PlannedTensor(lazy, key, converted(lazy, dtype)) for key, lazy in tensors.items())
    return in_files(planned, max_shard_nbytes, writers)


def in_files(tensors: Iterable[PlannedTensor], max_nbytes: int, writers: Sequence[int]) -> list[PlannedFile]:
    """``tensors`` in files, one without tensors if there are none, for ``writers`` in turns."""
    files = []
    for index, content in enumerate(fill(tensors, max_nbytes)):
        header = build_header(((tensor.key, tensor.dtype, tensor.shape) for tensor in content), {"format": "pt"})
        files.append(PlannedFile(tuple(content), header, writers[index % len(writers)]))
    return files


def fill(tensors: Iterable[PlannedTensor], max_nbytes: int) -> list[list[PlannedTensor]]:
    """The tensors of each file, in the order in which they lie there; an empty one if there are none."""
    contents: list[list[PlannedTensor]] = []
    current: list[PlannedTensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.nbytes > max_nbytes:
            contents.append([tensor])  # the current file stays open, as Hugging Face's libraries keep it
            continue
        if filled + tensor.nbytes > max_nbytes:
            contents.append(current)
            current, filled = [], 0
        current.append(tensor)
        filled += tensor.nbytes
    if current or not contents:
        contents.append(current)
    for content in contents:
        content.sort(key=lambda tensor: -tensor.dtype.itemsize)  # each then begins at a multiple of its itemsize
    return contents


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
            f"max_shard_size is {size!r}",
            expected='a positive number of bytes, or text like "5GB" or "512MiB"',
            fix='"5GB"',
        )
    return nbytes


def check_dtype(dtype: torch.dtype | None) -> None:
    """Whether tensors can be converted to it. Raises: ArgumentError"""
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ArgumentError(f"dtype is {dtype!r}", expected="a floating-point dtype", fix="for instance torch.bfloat16")
