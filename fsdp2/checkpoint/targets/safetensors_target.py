"""Write a folder in Hugging Face's layout from lazy tensors, a band at a time. Of tied tensors the first name is written, as
``save_safetensors`` does. It refuses to know the format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..byte_ranges import bytes_of
from ..commit import NewFile, choose_names, commit, make_folder
from ..lazy import LazyTensor
from ..named_state import State
from ..readers.source import place_of
from ..safetensors_format import build_header
from ..save_plan import fill
from .streaming import Stream, converted


@dataclass(frozen=True)
class _Planned:
    key: str
    lazy: LazyTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lazy.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(folder: Path, model: State, stream: Stream, max_shard_nbytes: int) -> None:
    """Write the tensors of ``model`` into a new ``folder``. Memory: one band. Raises: CheckpointError naming file and key"""
    planned: dict[Any, _Planned] = {}
    for key, lazy in model.items():
        if isinstance(lazy, LazyTensor):
            planned.setdefault(place_of(lazy), _Planned(key, lazy, converted(lazy, stream.dtype)))
    contents = fill(planned.values(), max_shard_nbytes)
    make_folder(folder)
    names = choose_names(folder, len(contents), "0" * 8)
    nbytes = []
    for index, content in enumerate(contents):
        header = build_header(((each.key, each.dtype, each.shape) for each in content), {"format": "pt"})
        nbytes.append(len(header) + sum(each.nbytes for each in content))
        _write(NewFile(names.temporary(folder, index), header), content, stream)
    weight_map = {each.key: name for content, name in zip(contents, names.final, strict=True) for each in content}
    everything = [each for content in contents for each in content]
    metadata = {
        "total_parameters": sum(math.prod(each.shape) for each in everything),
        "total_size": sum(each.nbytes for each in everything),
    }
    commit(folder, names, nbytes, weight_map, metadata)


def _write(file: NewFile, content: list[_Planned], stream: Stream) -> None:
    try:
        for each in content:
            for band in stream.bands(each.lazy, each.dtype):
                file.write(bytes_of(band), each.key)
        file.finish()
    finally:
        file.close()
