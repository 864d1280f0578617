"""``verify``: whether a checkpoint's bytes are the ones that were written; ``fsdp2 verify PATH``.

It compares CRC-32s: safetensors files of ``save_safetensors`` and ``convert`` have that of each tensor in their header; files of
``torch.save`` (also DCP's chunks) that of each record in their directory; and folders of ``Checkpointer`` and ``convert`` have
``digests.json`` for the other bytes.
"""

from __future__ import annotations

import argparse
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..arguments import COUNT, Kind, checked_path, require
from ..errors import CheckpointError
from ..printable import say
from .dcp_files import METADATA, read_metadata
from .digests import DIGESTS, FileDigest, read_digests
from .failure import failure
from .hf_folder import digest_of, open_checkpoint, read_index, told_digest
from .readers.deepspeed import find_deepspeed
from .readers.files import FORMATS, check_format, dcp_folders, detect, families
from .readers.opened import family_meant
from .readers.torch_file import Window, is_torch_file
from .regular_file import open_regular
from .safetensors_format import digests_of, read_header

_PIECE_NBYTES = 16 << 20
_NOWHERE = -1
"""Stands in place of the CRC-32 of a chunk's directory, if ``digests.json`` knows the file and not the chunk."""


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose bytes are as they were written.

    nbytes:    that were read and compared
    unchecked: names of files without digests
    """

    path: Path
    format: str
    nbytes: int
    unchecked: tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """``check`` returns the bytes compared, None if there is nothing to compare with. Raises: ValueError, saying what is wrong

    problem: why the parts of the file cannot be told apart, if so; it has no other part then
    """

    file: Path
    name: str
    check: Callable[[], int | None]
    problem: CheckpointError | None = None


_SHARE = Kind(
    lambda share: isinstance(share, tuple) and len(share) == 2 and COUNT.holds(share[1]) and share[0] in range(share[1]),
    "a tuple (index, count)",
    "(0, 1)",
)


def verify(path: str | os.PathLike[str], *, format: str | None = None, share: tuple[int, int] = (0, 1)) -> Verified:
    """Read a checkpoint and compare it with the digests that it has; of a folder of ``Checkpointer``, all checkpoints in it.

    path, format: as for ``open_source``
    share:        (index, count) compares every ``count``-th part alone, from ``index`` on: ranks share the work

    Collective: no
    Memory:     a piece of 16 MiB, and the descriptions of the files
    Raises:     CheckpointError naming files and keys that are damaged, missing or cut short

    Example:
        fsdp2.checkpoint.save_safetensors(model, folder)
        fsdp2.checkpoint.verify(folder).unchecked  # ()
    """
    check_format(format)
    root = checked_path("verify", "path", path)
    require("verify", _SHARE, share=share)
    kind = format or detect(root)
    index, count = share
    nbytes, unchecked = 0, []
    damaged: list[tuple[_Part, str]] = []
    for number, part in enumerate(_parts(root, kind)):
        if part.problem is not None:  # of every rank: it numbers the parts behind otherwise than the ranks that have no problem
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
            fix="take another copy, or another checkpoint",
            file=first.file,
            key=first.name,
        )
    return Verified(root, kind, nbytes, tuple(unchecked))


def _shown(file: Path, root: Path) -> str:
    """Its name, with its folder where ``root`` has several."""
    return str(file.relative_to(root)) if root in file.parents else file.name


def _parts(path: Path, kind: str) -> Iterator[_Part]:
    if kind == "safetensors":
        opened = open_checkpoint(path)
        if opened.path.suffix == ".json":
            yield _of_index(opened.path)
        for file in dict.fromkeys(stored.path for stored in opened.tensors.values()):
            yield from _of_safetensors(file)
    elif kind == "dcp":
        for folder in [path] if (path / METADATA).is_file() else dcp_folders(path):
            yield from _or_problem(folder / METADATA, _of_dcp(folder))
    else:
        for file in _torch_files(path, kind):
            yield from _or_problem(file, _of_torch_file(file))


def _or_problem(file: Path, parts: Iterator[_Part]) -> Iterator[_Part]:
    """``parts``, as far as they can be told: other files are compared all the same."""
    try:
        yield from parts
    except CheckpointError as error:
        yield _Part(file, "", lambda: None, error)


def _torch_files(path: Path, kind: str) -> list[Path]:
    """The files that ``open_source`` reads."""
    if kind == "deepspeed":
        folder = find_deepspeed(path) or path
        found = sorted(folder.glob("*_states.pt"))
        if not found:
            expected = "what the file 'latest' names, or *_states.pt of DeepSpeed"
            raise failure(f"{folder} has no checkpoint", expected=expected, file=folder)
        return found
    together = families(path) if path.is_dir() else [family_meant(path)]
    return [file for family in together for file in family.paths]


# --- safetensors ------------------------------------------------------------------------------------------------------------------


def _of_index(path: Path) -> _Part:
    def check() -> int | None:
        told, found = told_digest(path), digest_of(read_index(path))
        if told not in (None, found):
            raise ValueError(f"has the CRC-32 {found}, {told} was written")
        return None if told is None else path.stat().st_size

    return _Part(path, "the index", check)


def _of_safetensors(path: Path) -> Iterator[_Part]:
    header = read_header(path)
    with open_regular(path) as file:
        text = file.read(header.nbytes)
    told = digests_of(path, text, list(header.entries))
    yield _Part(path, "the header", lambda: None if told is None else _equal(told.header, told.found, len(text)))
    for key, entry in header.entries.items():
        expected = None if told is None else told.tensors[key]
        yield _Part(path, key, _checked_range(path, entry.offset, entry.nbytes, expected))


def _checked_range(path: Path, offset: int, nbytes: int, expected: int | None) -> Callable[[], int | None]:
    def check() -> int | None:
        if expected is None:
            return None
        with open_regular(path) as file:
            return _equal(expected, _crc(file, offset, nbytes), nbytes)

    return check


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


# --- zips of torch.save -----------------------------------------------------------------------------------------------------------


def _of_dcp(folder: Path) -> Iterator[_Part]:
    digests = read_digests(folder)
    for name, digest in (digests or {}).items():
        yield _Part(folder / name, "the file", _checked_file(folder / name, digest))
    if digests is None:
        yield _Part(folder / METADATA, "the file", lambda: None)
    for index, info in (read_metadata(folder).storage_data or {}).items():
        directories = digests[info.relative_path].directories if digests is not None and info.relative_path in digests else None
        expected = None if directories is None else directories.get(info.offset, _NOWHERE)
        yield from _of_zip(folder / info.relative_path, info.offset, info.length, str(index.fqn), expected)


def _of_torch_file(path: Path) -> Iterator[_Part]:
    if not is_torch_file(path):
        raise failure(f"{path} does not begin like a file of torch.save", expected="a whole file", file=path)
    return _of_zip(path, 0, None, "", None)


def _checked_file(path: Path, digest: FileDigest) -> Callable[[], int | None]:
    def check() -> int | None:
        if not path.is_file():
            raise ValueError("is missing")
        nbytes = path.stat().st_size
        if nbytes != digest.nbytes:
            raise ValueError(f"has {nbytes} bytes, {digest.nbytes} were written")
        if digest.crc32 is None:
            return 0
        with open_regular(path) as file:
            return _equal(digest.crc32, _crc(file, 0, nbytes), nbytes)

    return check


def _of_zip(path: Path, offset: int, length: int | None, key: str, directory: int | None) -> Iterator[_Part]:
    """One part: opening it takes as long as reading a small one."""

    def check() -> int | None:
        with open_regular(path) as file:
            nbytes = file.seek(0, os.SEEK_END) - offset if length is None else length
            window = Window(file, offset, nbytes)
            try:
                zipped = zipfile.ZipFile(window)
            except zipfile.BadZipFile as error:
                raise ValueError(f"is no zip, as torch.save of torch 1.6 or later writes: {error}") from error
            if directory == _NOWHERE:
                raise ValueError(f"is at byte {offset}, where {DIGESTS} has nothing")
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

    yield _Part(path, key or "its records", check)


# --- the command ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fsdp2 verify``."""
    parser.add_argument("path", help="folder or file")
    parser.add_argument("--from", dest="format", choices=FORMATS, help="the format of PATH, where it is not what the files look like")


def run(options: argparse.Namespace) -> int:
    """Compare, and print the result."""
    done = verify(options.path, format=options.format)
    say(f"{done.path}: {done.nbytes / 1e6:.1f} MB of {done.format} are as they were written")
    for each in done.unchecked[:20]:
        say(f"  no digest: {each}")
    if len(done.unchecked) > 20:
        say(f"  no digest: {len(done.unchecked) - 20} more")
    return 0
