"""Checks that DCP's metadata describe whole tensors: every element in one chunk, every chunk in a file of the folder.

Readers allocate what the metadata tell and fill what the chunks tell; where these differ, they would take for values what was in memory
before.

Worked example: a (4, 2) tensor whose chunks are rows [0, 2) twice, or [0, 2) and [3, 4), is refused; one of [0, 2) and [2, 4) is not.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from .boxes import Box, cover_problem
from .failure import failure
from .hf_folder import is_inside
from .pickle_limits import MAX_DEPTH


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """The chunk's box in its tensor."""
    start = tuple(chunk.offsets)
    return Box(start, tuple(at + size for at, size in zip(start, chunk.sizes, strict=True)))


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))


def check_metadata(path: Path, metadata: Metadata) -> None:
    """path: of the metadata, for messages.

    Raises: CheckpointError with the key that is wrong; AttributeError and its like where an object is not what it says
    """
    stored = set()
    for index, info in (metadata.storage_data or {}).items():
        name = info.relative_path
        if not isinstance(name, str) or not is_inside(name):
            raise _refused(path, index.fqn, f"{index.fqn} to be in {name!r}", "names of files in the folder: no absolute path, no '..'")
        if not all(type(each) is int and each >= 0 for each in (info.offset, info.length)):
            raise _refused(path, index.fqn, f"{index.fqn} at byte {info.offset!r}, {info.length!r} long", "two numbers of bytes")
        stored.add((index.fqn, None if index.offset is None else tuple(index.offset)))
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise _refused(path, str(key), f"a key {key!r}", "keys that are strings")
        chunks = _chunks(path, key, entry) if isinstance(entry, TensorStorageMetadata) else [None]
        missing = [offset for offset in chunks if (key, offset) not in stored]
        if missing:
            raise _refused(path, key, f"no file for {key}" + (f" at {missing[0]}" if missing[0] else ""), "a file for every chunk")
    _check_paths(path, metadata)


def _chunks(path: Path, key: str, entry: TensorStorageMetadata) -> list[tuple[int, ...] | None]:
    """The starts of the chunks that have elements."""
    shape = tuple(entry.size)
    boxes = []
    for chunk in entry.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise _refused(path, key, f"a chunk of shape {tuple(chunk.sizes)} for {key} {shape}", "as many dims")
        boxes.append(box_of(chunk))
    problem = cover_problem(shape, boxes)
    if problem is not None or not isinstance(entry.properties.dtype, torch.dtype):
        raise _refused(path, key, f"no whole {key} {shape}: {problem or 'its dtype is unknown'}", "every element in one chunk")
    return [box.start for box in boxes if box.numel]


def _check_paths(path: Path, metadata: Metadata) -> None:
    """Check the paths of values in the nested state: no path may be both a value and a dict."""
    places: dict[str, Any] = metadata.planner_data or {}
    for key, place in places.items():
        if not isinstance(place, tuple) or not 0 < len(place) <= MAX_DEPTH or not all(isinstance(part, (str, int)) for part in place):
            raise _refused(path, str(key), f"{key} at {str(place)[:100]}", f"a place of at most {MAX_DEPTH} keys and numbers")
    ordered = sorted(places.items(), key=lambda item: [(isinstance(part, str), part) for part in item[1]])
    for (key, place), (_, following) in itertools.pairwise(ordered):  # what begins with a place comes right after it
        if len(place) < len(following) and following[: len(place)] == place:
            raise _refused(path, key, f"{key} as a value and as a dict", "one of these")


def _refused(path: Path, key: str, what: str, expected: str) -> Exception:
    return failure(f"{path} has {what}", expected=expected, fix="copy the checkpoint again, or take another", file=path, key=key)
