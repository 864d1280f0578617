"""Reads DCP folders, saved by any program, without running code from them.

DCP's own reader unpickles a checkpoint's metadata, and all values except tensors, without limits: anyone who can write
a checkpoint can run code. Here metadata may name only the classes that DCP uses, and values only those of
``torch.load(weights_only=True)``. Metadata must also describe whole tensors: readers allocate what it says and fill what
the chunks cover, so a gap would leave uninitialized memory in place of values.

Worked example: a (4, 2) tensor whose chunks are rows [0, 2) twice, or [0, 2) and [3, 4), is refused; one of [0, 2) and [2, 4) is not.

Note: what a checkpoint can hold. Tensors; numbers, strings, bytes, None; dicts, lists, tuples and sets of these.
``pack`` raises an error for other values when they are saved, not when they are loaded. It also keeps DCP from
flattening dicts, which would turn int keys into strings and tuples into lists, and lose empty ones.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import CheckpointError
from .failures import describe, failure, readable
from .file_reading import ByteReader, is_inside, open_regular
from .inert_pickle import MAX_DEPTH, BoundedUnpickler, check_keys, checked_ordered_dict, unpickle
from .lazy_tensors import NAMES, Assembled, LazyTensor, State, Stored, dtype_of
from .shard_geometry import Box, cover_problem
from .torch_file import data_behind, description_of, head_nbytes, read_torch_file, stored

METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},  # Python 3.13
}


class _MetadataUnpickler(BoundedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return checked_ordered_dict
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of DCP's metadata")

    def build(self, made: Any, state: Any) -> bool:
        if isinstance(made, type) or not is_dataclass(made):
            return False
        if isinstance(made, TensorProperties):
            known = len(TensorProperties().__getstate__())  # type: ignore[no-untyped-call]
            made.__setstate__(state[:known])  # type: ignore[no-untyped-call]  # a later torch adds fields that no reader needs
        else:
            vars(made).update(state)
        if isinstance(made, MetadataIndex):
            check_keys([(made.fqn, made.offset, made.index)])  # it is a dict's key
        return True


def read_metadata(folder: Path, has_all_files: bool = True) -> Metadata:
    """The metadata of a complete checkpoint, all of whose files exist and are long enough.

    has_all_files: False: files may be missing, on other hosts
    Raises:        CheckpointError
    """
    path = folder / METADATA
    if not path.is_file():
        raise failure(
            f"{folder} is no checkpoint: it has no {METADATA}" if folder.is_dir() else f"{folder} is no folder",
            expected="a folder that a save completed; an interrupted save leaves one named 'partial_...'",
            fix="name another checkpoint, or none for the latest",
            file=path,
        )
    try:
        with open_regular(path) as file:
            data = file.read()
        metadata = _MetadataUnpickler(data).load()
        shapes = {type(each) for each in metadata.state_dict_metadata.values()}
        if not isinstance(metadata, Metadata) or not shapes <= {BytesStorageMetadata, TensorStorageMetadata}:
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        check_metadata(path, metadata)
        if has_all_files:
            check_files(folder, metadata)
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle may raise any error
        raise failure(f"{path} cannot be read: {error}", expected="metadata as dcp.save writes it", file=path) from error
    return metadata


def check_files(folder: Path, metadata: Metadata) -> None:
    """Raises: CheckpointError if a file that ``metadata`` names is missing or cut short"""
    wanted: dict[str, tuple[int, str]] = {}  # of each file, where its last tensor ends, and that tensor's key
    for index, info in (metadata.storage_data or {}).items():
        wanted[info.relative_path] = max(wanted.get(info.relative_path, (0, "")), (info.offset + info.length, str(index.fqn)))
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else None for name in wanted}
    broken = sorted(name for name, (nbytes, _) in wanted.items() if (sizes[name] or 0) < nbytes)
    if broken:
        whys = {name: "is missing" if sizes[name] is None else f"has {sizes[name]} bytes of {wanted[name][0]}" for name in broken}
        raise failure(
            f"{folder} has {len(broken)} files that are missing or cut short",
            items=[f"{name}: {why}, with {wanted[name][1]}" for name, why in whys.items()],
            expected="all files that the save has written",
            file=folder / broken[0],
            key=wanted[broken[0]][1],
        )


def unflatten(flat: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """The nested state that DCP flattened when saving: ``{"a": {"b": [1]}}`` from ``{"a.b.0": 1}``."""
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        *path, last = (metadata.planner_data or {}).get(key, (key,))
        into = root
        for part in path:
            into = into.setdefault(part, {})
        into[last] = value
    return _with_lists(root)  # type: ignore[no-any-return]


def _with_lists(node: Any) -> Any:
    """Strings in a path are keys; ints from 0 on without a gap are indices of lists."""
    if not isinstance(node, dict):
        return node
    if node and all(type(key) is int for key in node) and sorted(node) == list(range(len(node))):
        return [_with_lists(node[index]) for index in range(len(node))]
    return {key: _with_lists(value) for key, value in node.items()}


def pack(value: Any, what: str) -> bytes:
    """``value`` as bytes for ``unpack``. Raises: CheckpointError if ``unpack`` would not accept them"""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpack(buffer.getvalue())
    except Exception as error:
        raise failure(
            f"{what} cannot be saved: {str(error).strip().splitlines()[0]}",
            expected="tensors, numbers, strings and containers of these, which torch.load(weights_only=True) accepts",
            fix="let its state_dict() return such values",
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value in a file of ``torch.save`` without compression. Raises: any error that a broken file may raise"""
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        inflated = [info.filename for info in zipped.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if inflated:
            raise ValueError(f"{inflated[0]} is compressed")
        for name in zipped.namelist():
            if name.endswith("data.pkl"):
                unpickle(zipped.read(name), lambda saved: None)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


# --- checks of the metadata -------------------------------------------------------------------------------------------------------


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """The chunk's box in its tensor."""
    start = tuple(chunk.offsets)
    return Box(start, tuple(at + size for at, size in zip(start, chunk.sizes, strict=True)))


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))


def check_metadata(path: Path, metadata: Metadata) -> None:
    """path: of the metadata, for messages.

    Raises: CheckpointError with the key that is wrong; AttributeError and the like for objects of wrong types
    """
    stored = set()
    for index, info in (metadata.storage_data or {}).items():
        name = info.relative_path
        if not isinstance(name, str) or not is_inside(name):
            raise _refused(path, index.fqn, f"{index.fqn} to be in {name!r}", "names of files in the folder: no absolute path, no '..'")
        if not all(type(each) is int and each >= 0 for each in (info.offset, info.length)):
            raise _refused(
                path, index.fqn, f"{index.fqn} at byte {info.offset!r}, {info.length!r} long", "an offset and a length in bytes"
            )
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
            raise _refused(path, key, f"a chunk of shape {tuple(chunk.sizes)} for {key} {shape}", "the same number of dims")
        boxes.append(box_of(chunk))
    problem = cover_problem(shape, boxes)
    if problem is not None or not isinstance(entry.properties.dtype, torch.dtype):
        raise _refused(path, key, f"no whole {key} {shape}: {problem or 'its dtype is unknown'}", "every element in one chunk")
    return [box.start for box in boxes if box.numel]


def _check_paths(path: Path, metadata: Metadata) -> None:
    """Check the paths of values in the nested state: none may be both a value and a dict."""
    places: dict[str, Any] = metadata.planner_data or {}
    for key, place in places.items():
        if not isinstance(place, tuple) or not 0 < len(place) <= MAX_DEPTH or not all(isinstance(part, (str, int)) for part in place):
            raise _refused(path, str(key), f"{key} at {str(place)[:100]}", f"a path of at most {MAX_DEPTH} keys and indices")
    ordered = sorted(places.items(), key=lambda item: [(isinstance(part, str), part) for part in item[1]])
    for (key, place), (_, following) in itertools.pairwise(ordered):  # what begins with a place comes right after it
        if len(place) < len(following) and following[: len(place)] == place:
            raise _refused(path, key, f"{key} as a value and as a dict", "one of these")


def _refused(path: Path, key: str, what: str, expected: str) -> Exception:
    return failure(f"{path} has {what}", expected=expected, fix="copy the checkpoint again, or use another", file=path, key=key)


# --- tensors ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk(LazyTensor):
    """A tensor that was saved by itself in ``length`` bytes of a file from ``offset`` on."""

    path: Path
    key: str = field(compare=False)
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    length: int

    def stored(self) -> Iterator[Stored]:
        yield stored(self.path, self.key, self.dtype, self.shape, self.offset)

    def read(self, box: Box, out: Tensor, reader: ByteReader) -> None:
        found = self._as_we_write(reader) or read_torch_file(self.path, self.offset, self.length)
        if not isinstance(found, LazyTensor) or found.shape != self.shape or dtype_of(found) is not self.dtype:
            what = f"{dtype_of(found)} {found.shape}" if isinstance(found, LazyTensor) else type(found).__name__
            raise failure(
                f"{self.path} has {what} at byte {self.offset}, where {self.key} should be",
                expected=f"{self.dtype} {self.shape}, as {METADATA} says",
                file=self.path,
                key=self.key,
            )
        found.read(box, out, reader)

    def _as_we_write(self, reader: ByteReader) -> Stored | None:
        """The stored bytes, if the chunk begins as ``DigestingWriter`` writes: parsing costs more than a small read."""
        description = description_of(self.dtype, self.shape)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if description is None or head_nbytes(description, nbytes) + nbytes > self.length:
            return None
        start = reader.content(self.path, self.key, self.offset, head_nbytes(description, nbytes))
        if not data_behind(start, description, nbytes):
            return None
        return stored(self.path, self.key, self.dtype, self.shape, self.offset + len(start))


def read_dcp(folder: Path) -> State:
    """The nested state of a folder that ``dcp.save`` wrote, its tensors lazy. Raises: CheckpointError"""
    metadata = read_metadata(folder)
    if any(getattr(info, "transform_descriptors", None) for info in (metadata.storage_data or {}).values()):
        raise failure(
            f"{folder} is compressed",
            expected="files without extensions",
            fix="load it with DCP and save it again without extensions",
            file=folder,
        )
    chunks = DcpChunks(folder, metadata)
    return unflatten({key: chunks.value(key) for key in metadata.state_dict_metadata}, metadata)


class DcpChunks:
    """Where the values of a folder's keys lie."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata
        self._infos = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}

    def value(self, key: str) -> Any:
        """A tensor is lazy. Raises: CheckpointError, as all methods do"""
        if isinstance(self._metadata.state_dict_metadata[key], TensorStorageMetadata):
            return self._tensor(key)
        info = self._info(key)
        return read_torch_file(self._folder / info.relative_path, info.offset, info.length)

    def read(self, key: str, box: Box, out: Tensor, reader: ByteReader) -> None:
        """Fill ``out`` with ``box`` of a tensor."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.properties.dtype in NAMES:
            self._tensor(key).read(box, out, reader)
            return
        for place in map(box_of, entry.chunks):  # complex128, for instance
            common = box.intersect(place)
            if common.numel > 0:
                value = self.unpacked(key, place.start)
                out[common.seen_from(box.start).slices].copy_(value[common.seen_from(place.start).slices])

    def unpacked(self, key: str, offsets: tuple[int, ...] = ()) -> Any:
        """A value other than a tensor, or a tensor's chunk: a file of ``torch.save``."""
        info = self._info(key, offsets)
        path = self._folder / info.relative_path
        with readable(path, key), open_regular(path) as file:
            file.seek(info.offset)
            content = file.read(info.length)
        try:
            return unpack(content)
        except Exception as error:
            what = f"{path} is damaged at {key}: {describe(error)}"
            raise failure(what, expected="the bytes that were written", fix="use another checkpoint", file=path, key=key) from error

    def files(self, key: str, boxes: Sequence[Box] | None = None) -> set[str]:
        """The names of the files with a value, or with these parts of a tensor."""
        entry = self._metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata) or boxes is None:
            return {info.relative_path for (name, _), info in self._infos.items() if name == key}
        places = [place for place in map(box_of, entry.chunks) if any(place.intersect(box).numel for box in boxes)]
        return {self._info(key, place.start).relative_path for place in places}

    def _tensor(self, key: str) -> Assembled:
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        shape, dtype = tuple(entry.size), entry.properties.dtype
        if dtype not in NAMES:
            expected = "a dtype that safetensors knows"
            raise failure(f"{key} has dtype {dtype}", expected=expected, fix="convert it", file=self._folder, key=key)
        parts = []
        for box in map(box_of, entry.chunks):  # which cover it, see ``check_metadata``
            info = self._info(key, box.start)
            parts.append((box, Chunk(self._folder / info.relative_path, key, dtype, box.shape, info.offset, info.length)))
        return Assembled(shape, tuple(parts))

    def _info(self, key: str, offsets: tuple[int, ...] = ()) -> Any:
        info = self._infos.get((key, offsets))
        if info is None:
            what = f"the chunk at {offsets}" if offsets else "the bytes"
            raise failure(
                f"{self._folder} does not have {what} of {key}",
                expected="all files of one save",
                file=self._folder / METADATA,
                key=key,
            )
        return info
