"""The safetensors format: a header that tells where each tensor's bytes are. Only this file reads, checks and builds headers.

A file is 8 bytes (little-endian length of the header), the header (JSON), then the tensors' bytes one after another, C-contiguous,
little-endian, without gaps.

The safetensors library checks the files that we have written (see ``hf_commit.py``). We read headers ourselves because it tells no
offsets, without which no rank could read its byte ranges alone, and neither bounds what a damaged header costs nor names its key. We
write them ourselves because it writes whole tensors that are in memory, where we write a stream.

Worked example: one fp16 tensor "a" of shape (2,):

    b"\\x38\\0\\0\\0\\0\\0\\0\\0" + b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}  ' + 4 bytes

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

from .failure import failure, readable
from .regular_file import open_regular

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_NBYTES = 100_000_000
"""The limit of the reference implementation, against files that make a reader allocate."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    dtype:  the format's name for it, a key of ``DTYPES`` or one that torch has no dtype for (``F4``, ...)
    offset: of its first byte, from the beginning of the file
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's description of itself; ``nbytes`` is the length of header and its length field, where the tensors begin."""

    entries: dict[str, Entry]
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
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise failure(f"{path} has a corrupt header: {error}", expected="a JSON object in UTF-8", file=path) from error
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
            _refuse(path, f"has {key} at byte {entry.offset}", f"it at byte {end}, behind the tensor before it", key)
        end += entry.nbytes
    if end > file_nbytes:
        first = next(key for key, entry in entries.items() if entry.offset + entry.nbytes > file_nbytes)
        _refuse(path, f"is truncated: {file_nbytes} of {end} bytes; {first} is not whole", "a whole file: copy it again", first)
    if end < file_nbytes:
        _refuse(path, f"has {file_nbytes - end} bytes behind its last tensor", f"{end} bytes in all")
    return Header(entries, metadata, start)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: an object whose names all differ. Raises: ValueError"""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name[:100]!r} occurs twice")
        fields[name] = value
    return fields


def _entry(path: Path, key: str, fields: Any, start: int) -> Entry:
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
    return Entry(dtype, tuple(shape), start + begin, end - begin)


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
