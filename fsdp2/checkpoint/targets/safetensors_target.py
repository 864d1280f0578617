"""Write a folder in Hugging Face's layout from lazy tensors, a band at a time. Of tied tensors the first name is written, as
``save_safetensors`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..byte_ranges import bytes_of
from ..hf_commit import NewFile, choose_names, commit, make_folder
from ..lazy import LazyTensor
from ..named_state import State
from ..readers.source import place_of
from ..safetensors_plan import PlannedFile, PlannedTensor, in_files, index_metadata, weight_map
from .streaming import Stream, converted


def write_safetensors(folder: Path, model: State, stream: Stream, max_shard_nbytes: int) -> None:
    """Write the tensors of ``model`` into a new ``folder``. Memory: one band. Raises: CheckpointError naming file and key"""
    planned: dict[Any, PlannedTensor] = {}
    for key, lazy in model.items():
        if isinstance(lazy, LazyTensor):
            planned.setdefault(place_of(lazy), PlannedTensor(lazy, key, lazy.shape, converted(lazy, stream.dtype)))
    files = in_files(planned.values(), max_shard_nbytes, [0])
    make_folder(folder)
    names = choose_names(folder, len(files), "0" * 8)
    for index, file in enumerate(files):
        _write(NewFile(names.temporary(folder, index), file.header), file, stream)
    commit(folder, names, [file.nbytes for file in files], weight_map(files, names.final), index_metadata(files))


def _write(new: NewFile, file: PlannedFile, stream: Stream) -> None:
    try:
        for each in file.tensors:
            for band in stream.bands(each.lazy, each.dtype):
                new.write(bytes_of(band), each.key)
        new.finish()
    finally:
        new.close()
