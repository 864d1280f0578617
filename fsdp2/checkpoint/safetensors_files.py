"""Reads and checks safetensors files and the folders they lie in, and builds headers: only this file knows the format.

A file is 8 bytes (little-endian length of the header), the header (JSON), then the tensors' bytes one after another, C-contiguous,
little-endian, without gaps. A folder has one ``model.safetensors``, or several files and an index of their keys.

The safetensors library checks the files that we have written (see ``folder_commit.py``). We read headers ourselves because the library
tells no offsets, without which no rank could read its byte ranges alone, and neither bounds the cost of a damaged header nor names
its key. We write them ourselves because the library writes whole tensors from memory, where we write a stream.

Worked examples: one fp16 tensor "a" of shape (2,), and an index, ``model.safetensors.index.json``:

    b"\\x38\\0\\0\\0\\0\\0\\0\\0" + b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}  ' + 4 bytes

    {"metadata": {"total_size": 26},
     "weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}

Source: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from .failures import failure, readable
from .file_reading import is_inside, open_regular
from .lazy_tensors import DTYPES, NAMES, Stored

MAX_HEADER_NBYTES = 100_000_000
"""The limit of the reference implementation, against files that make a reader allocate."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's description of itself; ``nbytes`` is the length of header and its length field, where the tensors begin."""

    entries: dict[str, Stored]
    metadata: dict[str, str]
    nbytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of a file, whose length must be what the header says. Collective: no.

    Raises: CheckpointError naming the file, and the key where there is one.
    """
    with readable(path), open_regular(path) as file:
        file_nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if file_nbytes < 8:
            _refuse(path, f"is {file_nbytes} bytes long", "at least 8 bytes")
        if not 2 <= length <= MAX_HEADER_NBYTES:
            _refuse(path, f"has a header of {length} bytes", f"2 to {MAX_HEADER_NBYTES}: is it a safetensors file?")
        text = file.read(length)
    if len(text) < length:
        _refuse(path, f"ends within its header: {8 + len(text)} of {8 + length} bytes", "a whole file")
    return parse_header(path, text, file_nbytes)


def parse_header(path: Path, text: bytes, file_nbytes: int) -> Header:
    """Check the JSON ``text`` of a file that is ``file_nbytes`` long; ``path`` is for messages."""
    fields = _parsed(path, text, "has a corrupt header")
    if not isinstance(fields, dict):
        _refuse(path, f"has a header that is a {type(fields).__name__}", "a JSON object")
    metadata = fields.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "has __metadata__ that is not text to text", "a JSON object of strings")
    start = 8 + len(text)
    entries = {key: _entry(path, key, value, start) for key, value in fields.items()}
    end = start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            _refuse(path, f"has {key} at byte {entry.offset}", f"it at byte {end}, after the tensor before it", key)
        end += entry.nbytes
    if end > file_nbytes:
        first = next(key for key, entry in entries.items() if entry.offset + entry.nbytes > file_nbytes)
        _refuse(path, f"is truncated: {file_nbytes} of {end} bytes; {first} is not whole", "a whole file: copy it again", first)
    if end < file_nbytes:
        _refuse(path, f"has {file_nbytes - end} bytes after its last tensor", f"{end} bytes in all")
    return Header(entries, metadata, start)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: an object whose names all differ. Raises: ValueError"""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name[:100]!r} occurs twice")
        fields[name] = value
    return fields


def _entry(path: Path, key: str, fields: Any, start: int) -> Stored:
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            all(type(value) is int and value >= 0 for value in (*shape, begin, end)) and begin <= end
        ):
            pass
        case _:
            expected = "a dtype, a shape, and two data_offsets in order"
            _refuse(path, f"has a corrupt header: {key} is {str(fields)[:200]}", expected, key)
    known = DTYPES.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - begin:
        wanted = math.prod(shape) * known.itemsize
        _refuse(path, f"gives {key} {end - begin} bytes", f"{wanted} for {dtype} of shape {tuple(shape)}", key)
    return Stored(path, key, dtype, tuple(shape), start + begin, end - begin)


def _refuse(path: Path, problem: str, expected: str, key: str | None = None) -> NoReturn:
    raise failure(f"{path} {problem}", expected=expected, file=path, key=key)


_DIGESTS = "fsdp2_crc32"
"""The key in ``__metadata__``: eight hexadecimal digits for the header itself, with zeros for all of these, and for each tensor."""


_PREFIX = f'{{"__metadata__":{{"{_DIGESTS}":"'.encode()


@dataclass(frozen=True)
class Digests:
    """The CRC-32s that a header has: ``header`` its own, ``found`` that of its bytes as they are; ``tensors`` those of the tensors."""

    header: int
    found: int
    tensors: dict[str, int]


def digests_of(path: Path, start: bytes, keys: Sequence[str]) -> Digests | None:
    """The digests in the first bytes of a file, its header; None if there are none.

    path:   for messages
    keys:   of the tensors, in the header's order
    Raises: CheckpointError if they are damaged themselves
    """
    place = _digits(start, len(keys))
    if place is None:
        return None
    try:
        told = [int(start[at : at + 8], 16) for at in range(place.start, place.stop, 8)]
    except ValueError as error:
        raise failure(f"{path} has digests that are damaged: {error}", expected="hexadecimal digits", file=path) from error
    zeros = start[: place.start] + b"0" * (place.stop - place.start) + start[place.stop :]
    return Digests(told[0], zlib.crc32(zeros), dict(zip(keys, told[1:], strict=True)))


def with_digests(start: bytes, crcs: Mapping[str, int]) -> bytes:
    """A header from ``build_header`` with the CRC-32 of each tensor, 0 where ``crcs`` has none; any other text stays as it is."""
    if not start[8:].startswith(_PREFIX):
        return start
    keys = [key for key in json.loads(start[8:]) if key != "__metadata__"]
    place = _digits(start, len(keys))
    assert place is not None
    digits = "".join(f"{crc:08x}" for crc in (zlib.crc32(start), *(crcs.get(key, 0) for key in keys)))
    return start[: place.start] + digits.encode() + start[place.stop :]


def _digits(start: bytes, num_tensors: int) -> range | None:
    """Where they are: ours is the first key of ``__metadata__``, which is the first of the header."""
    if start[8 : 8 + len(_PREFIX)] != _PREFIX:
        return None
    begin = 8 + len(_PREFIX)
    end = start.find(b'"', begin)
    return range(begin, end) if end - begin == 8 * (1 + num_tensors) else None


def build_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the tensors' own, for tensors that follow in this order; padded so that these begin at a multiple of 8.

    With room for digests, see ``with_digests``.

    Tensors of wider dtypes should come first, so that each begins at a multiple of its itemsize.
    """
    tensors = list(tensors)
    fields: dict[str, Any] = {"__metadata__": {_DIGESTS: "0" * 8 * (1 + len(tensors)), **metadata}}
    at = 0
    for key, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        fields[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- folders and indices ----------------------------------------------------------------------------------------------------------


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
        return Checkpoint(found, header.entries, header.nbytes)
    weight_map = read_index(found)
    keys_of: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        keys_of.setdefault(name, []).append(key)
    missing = [name for name in keys_of if not (found.parent / name).is_file()]
    if missing:
        raise failure(
            f"{found} names {len(missing)} files that are not there",
            items=[f"{name}: {len(keys_of[name])} keys, {keys_of[name][0]} among them" for name in sorted(missing)],
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
        tensors |= {key: header.entries[key] for key in keys_of[name]}
        header_bytes += header.nbytes
    return Checkpoint(found, tensors, header_bytes)


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
        fix="pass the index or the file; convert other formats to safetensors first",
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
        _refuse(path, "has no weight_map of keys to files", '{"weight_map": {"<key>": "<file>"}}')
    outside = {key: name for key, name in weight_map.items() if not is_inside(name)}
    if outside:
        raise failure(
            f"{path} names files outside of its folder",
            items=[f"{key}: {name!r}" for key, name in outside.items()],
            expected="names of files in the folder: no absolute path, no '..'",
            fix="do not trust this checkpoint; nothing was read from those files",
            file=path,
            key=next(iter(outside)),
        )
    return weight_map


def _fields(path: Path) -> dict[str, Any]:
    with readable(path), open_regular(path) as file:
        text = file.read(MAX_HEADER_NBYTES + 1)
    fields = _parsed(path, text, "is corrupt")
    return fields if isinstance(fields, dict) else {}


def _parsed(path: Path, text: bytes, problem: str) -> Any:
    try:
        if len(text) > MAX_HEADER_NBYTES:
            raise ValueError(f"it has more than {MAX_HEADER_NBYTES} bytes")
        return json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise failure(f"{path} {problem}: {error}", expected="a JSON object in UTF-8", file=path) from error
