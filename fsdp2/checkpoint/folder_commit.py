"""One rename replaces a folder's checkpoint, even if a crash comes before or after it.

Files are written under temporary names and renamed when all are complete. A new file never takes the name of one that
the earlier checkpoint still needs. So a reader finds the whole earlier checkpoint until the decisive rename, and the
new one from then on:

    new is one file       rename to model.safetensors (readers look for it first); then the old index and its files go
    new is several files  rename these (to names that readers do not look for yet), then the index; then the old files go
    ... over a single     as before, but the decisive step is that the old model.safetensors goes

A ``config.json`` that changes is moved away meanwhile, so that no reader combines weights with another checkpoint's
config: after a crash between these renames ``from_pretrained`` reports a missing config, until the next save restores
it. An unchanged one is left alone.

Before the decisive rename, the safetensors library must open every new file, because readers use that library.

The next save removes the remains of a crash, so only one save at a time may write to a folder; ``checkpoint_folder.py``
ensures that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..durable import sync_folder
from ..errors import CheckpointError
from .failures import failure
from .file_reading import open_regular
from .safetensors_files import INDEX, INDEX_DIGEST, SINGLE, digest_of, read_index, with_digests
from .safetensors_plan import PlannedFile

UNCHANGED = "free some space, or choose another folder; the earlier checkpoint is unchanged"


_NUMBERED = re.compile(r"model(-[0-9a-f]{8})?-[0-9]{5}-of-[0-9]{5}\.safetensors")
_TEMPORARY = re.compile(r"\.(model|config|generation_config).*\.[0-9a-f]{8}\.tmp")
_EARLIER = re.compile(r"\.(?P<name>.+\.json)\.earlier-(?P<decides>single|index)\.(?P<token>[0-9a-f]{8})\.tmp")


@dataclass(frozen=True)
class Names:
    """The name of each file, in order; ``token`` marks the temporary names of one save."""

    final: tuple[str, ...]
    token: str

    def temporary(self, folder: Path, index: int) -> Path:
        return _temporary(folder, self.final[index], self.token)


def _temporary(folder: Path, name: str, token: str) -> Path:
    return folder / f".{name}.{token}.tmp"


def _rename(path: Path, to: Path) -> None:
    """Rename, and replace an earlier file at once. Raises: CheckpointError"""
    with _reported(to):
        os.replace(path, to)


def _finish_interrupted(folder: Path) -> None:
    """Restore configs that a crash left moved away: the earlier ones with the earlier weights, else the new ones."""
    for aside in list(folder.iterdir()):
        match = _EARLIER.fullmatch(aside.name)
        if match is None or (folder / match["name"]).exists():
            continue
        undecided = any(folder.glob(f".model*.{match['token']}.tmp")) or (match["decides"] == "index" and (folder / SINGLE).exists())
        source = aside if undecided else _temporary(folder, match["name"], match["token"])
        if source.exists():
            _rename(source, folder / match["name"])


def choose_names(folder: Path, num_files: int, token: str) -> Names:
    """``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on; with the token if the folder has some of these."""
    if num_files == 1:
        return Names((SINGLE,), token)
    final = _numbered("model", num_files)
    if any((folder / name).exists() for name in final):
        final = _numbered(f"model-{token}", num_files)
    return Names(final, token)


def _numbered(stem: str, num_files: int) -> tuple[str, ...]:
    return tuple(f"{stem}-{index:05d}-of-{num_files:05d}.safetensors" for index in range(1, num_files + 1))


def make_folder(folder: Path) -> None:
    """Create it, or remove temporary files that a crash left in it."""
    with _reported(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _finish_interrupted(folder)
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()


class NewFile:
    """A file that is written in pieces, without a buffer. Raises: CheckpointError naming file and key

    The CRC-32 of each tensor is computed on the way and put into a safetensors header at the end.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self._header = header
        self._crcs: dict[str, int] = {}
        with _reported(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self.write(memoryview(header), None)
        except CheckpointError:
            self.remove()
            raise

    def write(self, data: memoryview, key: str | None) -> None:
        with _reported(self.path, key):
            if key is not None:
                self._crcs[key] = zlib.crc32(data, self._crcs.get(key, 0))
            while data:
                data = data[os.write(self._file, data) :]

    def finish(self) -> None:
        """Wait until it is on disk."""
        with _reported(self.path):
            os.pwrite(self._file, with_digests(self._header, self._crcs), 0)
            os.fsync(self._file)
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            with _reported(self.path):
                file, self._file = self._file, -1
                os.close(file)

    def remove(self) -> None:
        with contextlib.suppress(CheckpointError, OSError):
            self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


def commit(folder: Path, names: Names, files: Sequence[PlannedFile], configs: Mapping[str, bytes]) -> None:
    """Make ``files``, complete under their temporary names, the folder's checkpoint, and remove the earlier one's. For one rank.

    configs: files that belong to it, by name
    Raises:  CheckpointError; the earlier checkpoint then is unchanged, unless the message says otherwise
    """
    changed = {folder / name: content for name, content in configs.items() if _content(folder / name) != content}
    written: dict[Path, NewFile] = {}
    aside: dict[Path, Path] = {}  # the earlier ones; the next save restores them after a crash
    decides = "single" if len(names.final) == 1 else "index"
    try:
        for path, content in changed.items():  # before anything is renamed: the disk may be full
            written[path] = NewFile(_temporary(folder, path.name, names.token), content)
            written[path].finish()
        try:
            for path in changed:
                if path.exists():
                    to = _temporary(folder, f"{path.name}.earlier-{decides}", names.token)
                    _rename(path, to)
                    aside[path] = to
            _commit_weights(folder, names, files)
        except Exception:
            for path, to in aside.items():
                with contextlib.suppress(OSError):  # the next save tries again
                    to.replace(path)
            raise
        for path, file in written.items():
            _rename(file.path, path)
    finally:
        for file in written.values():
            file.remove()
    for path in aside.values():
        with contextlib.suppress(OSError):  # the next save tries again
            path.unlink()


def _content(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError:
        return None


def _commit_weights(folder: Path, names: Names, files: Sequence[PlannedFile]) -> None:
    for index, file in enumerate(files):
        path = names.temporary(folder, index)
        found = path.stat().st_size if path.exists() else 0
        if found != file.nbytes:
            raise failure(
                f"{path} has {found} bytes",
                expected=f"{file.nbytes} bytes, as its writer wrote",
                fix="save to a folder that all ranks share, or with num_writers=1; the earlier checkpoint is unchanged",
                file=path,
            )
        try:
            with safe_open(path, "pt"):
                pass  # it has read and checked the header
        except SafetensorError as error:
            raise failure(
                f"the safetensors library refuses {path}: {error}", expected="a file that it opens", fix=UNCHANGED, file=path
            ) from error
    earlier = _files_of_index(folder)
    if len(names.final) == 1:
        with _reported(folder / SINGLE):
            os.replace(names.temporary(folder, 0), folder / SINGLE)
        earlier = [INDEX, *earlier]  # the index goes first: it must not name missing files
    else:
        _commit_several(folder, names, files)
    for name in (name for name in earlier if name not in names.final):
        with contextlib.suppress(OSError):  # the new checkpoint is complete without
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        sync_folder(folder)


def _commit_several(folder: Path, names: Names, files: Sequence[PlannedFile]) -> None:
    index = _temporary(folder, INDEX, names.token)
    tensors = [tensor for file in files for tensor in file.tensors]
    file_of = {tensor.key: name for file, name in zip(files, names.final, strict=True) for tensor in file.tensors}
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
        INDEX_DIGEST: digest_of(file_of),
    }
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(file_of.items()))}, indent=2) + "\n"
    done: list[Path] = []
    try:
        file = NewFile(index, text.encode())
        done.append(index)
        file.finish()
        for position, name in enumerate(names.final):
            with _reported(folder / name):
                os.replace(names.temporary(folder, position), folder / name)
            done.append(folder / name)
        with _reported(folder / INDEX):
            sync_folder(folder)
            os.replace(index, folder / INDEX)
    except BaseException:
        for path in done:
            path.unlink(missing_ok=True)
        raise
    try:
        (folder / SINGLE).unlink(missing_ok=True)
    except OSError as error:
        raise failure(
            f"{folder / SINGLE} of the earlier checkpoint cannot be removed: {error.strerror or error}",
            expected="only the new checkpoint, which is complete; readers that look for a single file first still find the earlier one",
            fix=f"remove {SINGLE}",
            file=folder / SINGLE,
        ) from error


def _files_of_index(folder: Path) -> list[str]:
    """Names of the files of an earlier checkpoint of several files, and of those that a crash left without an index."""
    found = {path.name for path in folder.iterdir() if _NUMBERED.fullmatch(path.name)}
    with contextlib.suppress(CheckpointError):
        found |= {name for name in read_index(folder / INDEX).values() if name.endswith(".safetensors") and name != SINGLE}
    return sorted(found)


@contextlib.contextmanager
def _reported(path: Path, key: str | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" at {key}" if key else ""
        raise failure(
            f"{path} cannot be written{where}: {error.strerror or error}",
            expected="a folder that can be written to, and space for the new checkpoint next to the earlier one",
            fix=UNCHANGED,
            file=path,
            key=key,
        ) from error
