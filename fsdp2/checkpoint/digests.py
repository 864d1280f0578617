"""Digests of a checkpoint's own bytes, by which ``verify`` notices damage: CRC-32, computed while they are written.

Every record of a ``torch.save`` file has its CRC-32 in the file's directory. A DCP folder's chunks are such files, so ``digests.json``
keeps only the rest: the CRC-32 of ``.metadata`` and of each chunk's directory, which also shows that files were exchanged. A CRC
notices any damage of up to 32 bits in a row, and of other damage all but one in four billion cases; it is no protection against an
attacker.

    {"files": {".metadata": {"nbytes": 1310, "crc32": 2845392438}, "__0_0.distcp": {"nbytes": 1620, "directories": {"0": 93746151}}},
     "crc32": 3421780262}
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..durable import durable_file
from .failure import failure
from .hf_folder import is_inside
from .regular_file import open_regular

DIGESTS = "digests.json"
_MAX_NBYTES = 1 << 30


@dataclass
class FileDigest:
    """The digest of one file: its length, and its CRC-32, or those of its chunks' directories by the chunks' offsets."""

    nbytes: int
    crc32: int | None = None
    directories: dict[int, int] = field(default_factory=dict)


def directory_digest(data: bytes | memoryview) -> int | None:
    """The CRC-32 of the directory of a zip, and of all behind it; None if it is no zip."""
    try:
        start = zipfile.ZipFile(io.BytesIO(data)).start_dir
    except zipfile.BadZipFile:
        return None
    return zlib.crc32(memoryview(data)[start:])


def write_digests(folder: Path, files: dict[str, FileDigest], whole: Iterable[str]) -> None:
    """Write ``digests.json`` of ``files`` and of those named ``whole``, which are read for it."""
    for name in whole:
        data = (folder / name).read_bytes()
        files[name] = FileDigest(len(data), zlib.crc32(data))
    fields: dict[str, Any] = {}
    for name, digest in files.items():
        directories = {str(at): crc for at, crc in digest.directories.items()}
        fields[name] = {"nbytes": digest.nbytes} | ({"directories": directories} if digest.crc32 is None else {"crc32": digest.crc32})
    text = json.dumps({"files": fields, "crc32": _of(fields)})
    with durable_file(folder / DIGESTS) as file:
        file.write(text.encode())


def _of(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_digests(folder: Path) -> dict[str, FileDigest] | None:
    """The digests of a folder; None if another program wrote it. Raises: CheckpointError if they are damaged themselves"""
    path = folder / DIGESTS
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_NBYTES)
        told = json.loads(text.decode("utf-8"))
        fields = told["files"]
        if told["crc32"] != _of(fields):
            raise ValueError("its own CRC-32 is another one")
        found = {}
        for name, each in fields.items():
            if not is_inside(name):
                raise ValueError(f"it names {name!r}, outside of its folder")
            directories = {int(at): int(crc) for at, crc in each.get("directories", {}).items()}
            found[name] = FileDigest(int(each["nbytes"]), each.get("crc32"), directories)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise failure(
            f"{path} is damaged: {error}",
            expected="what the save has written",
            fix="take another copy; without this file the rest can be compared with the digests that it has itself",
            file=path,
        ) from error
