"""Compares a checkpoint's bytes with the digests that were written with them, and writes those of a DCP folder.

Digests are CRC-32s. Safetensors files of ``save_safetensors`` and ``convert`` have one per tensor in their header;
files of ``torch.save`` one per record in their directory. A DCP folder's chunks are such files, so ``digests.json``
holds only the rest: the CRC-32 of ``.metadata`` and of each chunk's directory, which also reveals exchanged files. A
CRC detects any damage of up to 32 bits in a row, and misses other damage once in four billion cases; it does not
protect against an attacker.

    {"files": {".metadata": {"nbytes": 1310, "crc32": 2845392438}, "__0_0.distcp": {"nbytes": 1620, "directories": {"0": 93746151}}},
     "crc32": 3421780262}
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..durable import durable_file
from ..errors import CheckpointError
from .dcp_read import METADATA, read_metadata
from .failures import failure
from .file_reading import is_inside, open_regular
from .safetensors_files import digest_of, digests_of, open_checkpoint, read_header, read_index, told_digest
from .torch_file import Window, is_torch_file

DIGESTS = "digests.json"
_MAX_NBYTES = 1 << 30


@dataclass
class FileDigest:
    """The digest of one file: its length, and its CRC-32, or those of its chunks' directories by the chunks' offsets.

    number: of the checkpoint, whose metadata this file is: one that was made later has a higher number; 0: unknown
    """

    nbytes: int
    crc32: int | None = None
    directories: dict[int, int] = field(default_factory=dict)
    number: int = 0


def directory_digest(data: bytes | memoryview) -> int | None:
    """The CRC-32 of a zip from its directory to its end; None if ``data`` is not a zip."""
    try:
        start = zipfile.ZipFile(io.BytesIO(data)).start_dir
    except zipfile.BadZipFile:
        return None
    return zlib.crc32(memoryview(data)[start:])


def write_digests(folder: Path, files: dict[str, FileDigest], whole: Iterable[str], number: int = 0) -> None:
    """Write ``digests.json`` for ``files`` and for those named ``whole``, which are read for it and get ``number``."""
    for name in whole:
        data = (folder / name).read_bytes()
        files[name] = FileDigest(len(data), zlib.crc32(data), number=number)
    fields: dict[str, Any] = {}
    for name, digest in files.items():
        directories = {str(at): crc for at, crc in digest.directories.items()}
        fields[name] = {"nbytes": digest.nbytes} | ({"directories": directories} if digest.crc32 is None else {"crc32": digest.crc32})
        if digest.number:
            fields[name]["number"] = digest.number
    text = json.dumps({"files": fields, "crc32": _of(fields)})
    with durable_file(folder / DIGESTS) as file:
        file.write(text.encode())


def _of(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_digests(folder: Path) -> dict[str, FileDigest] | None:
    """The digests of a folder; None if another program wrote it. Raises: CheckpointError if the digests are damaged"""
    path = folder / DIGESTS
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_NBYTES)
        told = json.loads(text.decode("utf-8"))
        fields = told["files"]
        if told["crc32"] != _of(fields):
            raise ValueError("its own CRC-32 does not match")
        found = {}
        for name, each in fields.items():
            if not is_inside(name):
                raise ValueError(f"it names {name!r}, outside of its folder")
            directories = {int(at): int(crc) for at, crc in each.get("directories", {}).items()}
            found[name] = FileDigest(int(each["nbytes"]), each.get("crc32"), directories, int(each.get("number", 0)))
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise failure(
            f"{path} is damaged: {error}",
            expected="the file as the save wrote it",
            fix="use another copy, or remove this file to check the rest by the digests in the other files",
            file=path,
        ) from error


def number_of(digests: dict[str, FileDigest] | None) -> int:
    """Of the checkpoint that ``digests`` are of."""
    return digests[METADATA].number if digests and METADATA in digests else 0


# --- comparing ---------------------------------------------------------------------------------------------------------------------


_PIECE_NBYTES = 16 << 20


_NOWHERE = -1
"""In place of a directory's CRC-32: ``digests.json`` lists the file but not the chunk."""


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose bytes match their digests.

    nbytes:    read and compared
    unchecked: names of what has no digest
    """

    path: Path
    format: str
    nbytes: int
    unchecked: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """``check`` returns the number of bytes compared; None without a digest. Raises: ValueError with the difference

    problem: why the file cannot be divided into parts, if so; this then is its only part
    """

    file: Path
    name: str
    check: Callable[[], int | None]
    problem: CheckpointError | None = None


def compared(root: Path, kind: str, parts: Iterable[Part], share: tuple[int, int]) -> Verified:
    """Read and compare every ``share[1]``-th of ``parts``, starting with ``share[0]``.

    Raises: CheckpointError naming files and keys that are damaged, missing or cut short
    """
    index, count = share
    nbytes, unchecked = 0, []
    damaged: list[tuple[Part, str]] = []
    for number, part in enumerate(parts):
        if part.problem is not None:  # for every rank: ranks without the problem number the later parts differently
            damaged.append((part, str(part.problem).splitlines()[0]))
            continue
        if number % count != index:
            continue
        try:
            done = part.check()
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            damaged.append((part, str(getattr(error, "strerror", None) or error)))
            continue
        nbytes += done or 0
        if done is None:
            unchecked.append(f"{_shown(part.file, root)}: {part.name}")
    damaged = [(part, why) for part, why in damaged if part.file.parent.is_dir()]  # a run may just have removed a checkpoint
    if damaged:
        first = damaged[0][0]
        if first.problem is not None and len(damaged) == 1:
            raise first.problem
        raise failure(
            f"{root} is damaged in {len(damaged)} places",
            items=[f"{_shown(part.file, root)}: {part.name} {why}" for part, why in damaged],
            expected="the bytes that were written",
            fix="use another copy or another checkpoint",
            file=first.file,
            key=first.name,
        )
    return Verified(root, kind, nbytes, tuple(unchecked))


def safetensors_parts(path: Path) -> Iterator[Part]:
    """The parts of a folder, an index or a file."""
    opened = open_checkpoint(path)
    if opened.path.suffix == ".json":
        yield Part(opened.path, "the index", partial(_checked_index, opened.path))
    for file in dict.fromkeys(stored.path for stored in opened.tensors.values()):
        yield from _of_safetensors(file)


def dcp_parts(folders: Iterable[Path], has_all_files: bool = True) -> Iterator[Part]:
    for folder in folders:
        parts = _or_problem(folder / METADATA, _of_dcp(folder, has_all_files))
        yield from (each for each in parts if has_all_files or each.file.exists())


def torch_parts(files: Iterable[Path]) -> Iterator[Part]:
    return (each for file in files for each in _or_problem(file, _of_torch_file(file)))


def _shown(file: Path, root: Path) -> str:
    """Its name, with its folder where ``root`` has several."""
    return str(file.relative_to(root)) if root in file.parents else file.name


def _or_problem(file: Path, parts: Iterator[Part]) -> Iterator[Part]:
    """``parts`` up to an error, then that error as a part: other files are still compared."""
    try:
        yield from parts
    except CheckpointError as error:
        yield Part(file, "", lambda: None, error)


def _checked_index(path: Path) -> int | None:
    told, found = told_digest(path), digest_of(read_index(path))
    if told not in (None, found):
        raise ValueError(f"has the CRC-32 {found}, {told} was written")
    return None if told is None else path.stat().st_size


def _of_safetensors(path: Path) -> Iterator[Part]:
    header = read_header(path)
    with open_regular(path) as file:
        text = file.read(header.nbytes)
    told = digests_of(path, text, list(header.entries))
    yield Part(path, "the header", lambda: None if told is None else _equal(told.header, told.found, len(text)))
    for key, entry in header.entries.items():
        expected = None if told is None else told.tensors[key]
        yield Part(path, key, partial(_checked_range, path, entry.offset, entry.nbytes, expected))


def _checked_range(path: Path, offset: int, nbytes: int, expected: int | None) -> int | None:
    if expected is None:
        return None
    with open_regular(path) as file:
        return _equal(expected, _crc(file, offset, nbytes), nbytes)


def _equal(expected: int, found: int, nbytes: int) -> int:
    if expected != found:
        raise ValueError(f"has the CRC-32 {found:08x}, {expected:08x} was written")
    return nbytes


def _crc(file: BinaryIO, offset: int, nbytes: int) -> int:
    file.seek(offset)
    crc, left = 0, nbytes
    while left:
        data = file.read(min(left, _PIECE_NBYTES))
        if not data:
            raise ValueError(f"is cut short by {left} bytes")
        crc = zlib.crc32(data, crc)
        left -= len(data)
    return crc


def _of_dcp(folder: Path, has_all_files: bool) -> Iterator[Part]:
    digests = read_digests(folder)
    for name, digest in (digests or {}).items():
        yield Part(folder / name, "the file", partial(_checked_file, folder / name, digest))
    if digests is None:
        yield Part(folder / METADATA, "the file", lambda: None)
    for index, info in (read_metadata(folder, has_all_files).storage_data or {}).items():
        directories = digests[info.relative_path].directories if digests is not None and info.relative_path in digests else None
        expected = None if directories is None else directories.get(info.offset, _NOWHERE)
        path = folder / info.relative_path
        yield Part(path, str(index.fqn) or "its records", partial(_checked_zip, path, info.offset, info.length, expected))


def _of_torch_file(path: Path) -> Iterator[Part]:
    if not is_torch_file(path):
        raise failure(f"{path} does not begin like a file of torch.save", expected="a whole file", file=path)
    yield Part(path, "its records", partial(_checked_zip, path, 0, None, None))  # opening it takes as long as reading a small one


def _checked_file(path: Path, digest: FileDigest) -> int | None:
    if not path.is_file():
        raise ValueError("is missing")
    nbytes = path.stat().st_size
    if nbytes != digest.nbytes:
        raise ValueError(f"has {nbytes} bytes, {digest.nbytes} were written")
    return 0 if digest.crc32 is None else _checked_range(path, 0, nbytes, digest.crc32)


def _checked_zip(path: Path, offset: int, length: int | None, directory: int | None) -> int | None:
    with open_regular(path) as file:
        nbytes = file.seek(0, os.SEEK_END) - offset if length is None else length
        try:
            zipped = zipfile.ZipFile(Window(file, offset, nbytes))
        except zipfile.BadZipFile as error:
            raise ValueError(f"is no zip, as torch.save of torch 1.6 or later writes: {error}") from error
        if directory == _NOWHERE:
            raise ValueError(f"is at byte {offset}, where {DIGESTS} lists nothing")
        if directory is not None:
            _equal(directory, _crc(file, offset + zipped.start_dir, nbytes - zipped.start_dir), 0)
        if sum(info.file_size for info in zipped.infolist()) > nbytes:
            raise ValueError("has records that overlap, or are compressed")
        without = [info for info in zipped.infolist() if info.CRC == 0 and info.file_size]
        for info in zipped.infolist():
            if info not in without:
                with zipped.open(info) as record:
                    while record.read(_PIECE_NBYTES):
                        pass  # zipfile compares at the end
        return None if without else nbytes
