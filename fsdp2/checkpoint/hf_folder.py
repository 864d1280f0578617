"""A checkpoint on disk, as Hugging Face lays it out: one ``model.safetensors``, or several files and an index of their keys.

This file finds the files, checks that index and headers agree, and refuses paths that lead outside of the folder.

Worked example of an index, ``model.safetensors.index.json``:

    {"metadata": {"total_size": 26},
     "weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from .failure import failure, readable
from .lazy import Stored
from .regular_file import open_regular
from .safetensors_format import MAX_HEADER_NBYTES, Header, read_header, without_duplicates

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were read and checked.

    tensors:      every key, in the order of the files
    header_bytes: how many bytes of files were read for that
    """

    path: Path
    tensors: dict[str, Stored]
    header_bytes: int


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a folder's checkpoint, of an index or of a single file. Collective: no.

    Raises: CheckpointError naming the files that are missing, corrupt, truncated, or outside of the folder
    """
    found = _find(Path(path))
    if found.suffix != ".json":
        header = read_header(found)
        return Checkpoint(found, _stored(found, header, header.entries), header.nbytes)
    weight_map = read_index(found)
    keys_of: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        keys_of.setdefault(name, []).append(key)
    missing = [name for name in keys_of if not (found.parent / name).is_file()]
    if missing:
        raise failure(
            f"{found} names {len(missing)} files that are not there",
            items=[f"{name}: has {keys_of[name][0]}" + _and_more(len(keys_of[name]) - 1) for name in sorted(missing)],
            expected=f"all {len(keys_of)} files in {found.parent}",
            fix="complete the download; nothing was changed",
            file=found.parent / missing[0],
            key=keys_of[missing[0]][0],
        )
    tensors: dict[str, Stored] = {}
    header_bytes = found.stat().st_size
    for name in sorted(keys_of):
        file = found.parent / name
        header = read_header(file)
        absent = [key for key in keys_of[name] if key not in header.entries]
        if absent:
            raise failure(
                f"{file} does not have {len(absent)} keys that {found.name} expects there",
                items=absent,
                expected="files and index of one save",
                file=file,
                key=absent[0],
            )
        tensors |= _stored(file, header, keys_of[name])
        header_bytes += header.nbytes
    return Checkpoint(found, tensors, header_bytes)


def _stored(path: Path, header: Header, keys: Iterable[str]) -> dict[str, Stored]:
    return {key: Stored(path, key, header.entries[key]) for key in keys}


def _and_more(count: int) -> str:
    return f" and {count} more keys" if count > 0 else ""


def _find(path: Path) -> Path:
    """The index or the single file that ``path`` means; a single ``model.safetensors`` goes before an index, as in transformers."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise failure(
            f"there is no checkpoint at {path}", expected="a folder, an index or a safetensors file", fix="check the path", file=path
        )
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            return path / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            break
    raise failure(
        f"{path} has no {SINGLE} and no {INDEX}",
        items=[each.name for each in sorted(path.iterdir())][:20],
        expected="one of them, or a single other index or safetensors file",
        fix="pass the index or the file itself; convert other formats to safetensors first",
        file=path,
    )


INDEX_DIGEST = "fsdp2_crc32"
"""A key of an index's metadata: ``digest_of`` its weight_map at the time of writing."""


def digest_of(weight_map: Mapping[str, str]) -> str:
    """The CRC-32 of names and files: an index that has lost a key is an index still."""
    return f"{zlib.crc32(json.dumps(sorted(weight_map.items())).encode()):08x}"


def told_digest(path: Path) -> str | None:
    """What an index that ``read_index`` reads tells about itself."""
    metadata = _fields(path).get("metadata")
    return str(metadata[INDEX_DIGEST]) if isinstance(metadata, dict) and INDEX_DIGEST in metadata else None


def read_index(path: Path) -> dict[str, str]:
    """For each key the name of its file; all are names inside the folder. Raises: CheckpointError"""
    weight_map = _fields(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise failure(f"{path} has no weight_map of keys to files", expected='{"weight_map": {"<key>": "<file>"}}', file=path)
    outside = {key: name for key, name in weight_map.items() if not is_inside(name)}
    if outside:
        raise failure(
            f"{path} names files outside of its folder",
            items=[f"{key}: {name!r}" for key, name in outside.items()],
            expected="names of files in the folder: no absolute path, no '..'",
            fix="do not trust this checkpoint; nothing was read from there",
            file=path,
            key=next(iter(outside)),
        )
    return weight_map


def _fields(path: Path) -> dict[str, Any]:
    with readable(path), open_regular(path) as file:
        text = file.read(MAX_HEADER_NBYTES + 1)
    try:
        if len(text) > MAX_HEADER_NBYTES:
            raise ValueError(f"it has more than {MAX_HEADER_NBYTES} bytes")
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise failure(f"{path} is corrupt: {error}", expected="a JSON object in UTF-8", file=path) from error
    if not isinstance(fields, dict):
        raise failure(f"{path} has no weight_map of keys to files", expected='{"weight_map": {"<key>": "<file>"}}', file=path)
    return fields


@functools.lru_cache(maxsize=1000)  # DCP's metadata name a file for each chunk
def is_inside(name: str) -> bool:
    """Whether ``name`` is a relative path that stays in its folder, on any system; ``"a/b"`` does, ``"../b"`` does not.

    Symbolic links may lead anywhere: the cache of huggingface_hub is made of them.
    """
    windows = PureWindowsPath(name)
    parts = {*PurePosixPath(name).parts, *windows.parts}
    return bool(parts) and ".." not in parts and not windows.anchor and not name.startswith("/") and "\0" not in name
