"""Read DCP's files without running what is in them.

DCP's own reader unpickles a checkpoint's metadata, and every value that is no tensor, without limits: a person who can write a
checkpoint can run code. Here metadata may name only the classes that DCP makes them of, and values only those of
``torch.load(weights_only=True)``.

Note: what a checkpoint can hold. Tensors; numbers, strings, bytes, None; dicts, lists, tuples and sets of these. ``pack`` refuses other
values when they are saved, rather than when they are needed. It also keeps DCP from taking dicts apart, which would turn int keys into
strings, tuples into lists, and lose empty ones.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from ..errors import CheckpointError
from .dcp_metadata_check import check_metadata
from .failure import failure
from .pickle_limits import BoundedUnpickler, check_key, check_pickle, checked_ordered_dict
from .regular_file import open_regular

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
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of DCP's metadata")

    def build(self, made: Any, state: Any) -> bool:
        if isinstance(made, type) or not is_dataclass(made):
            return False
        if isinstance(made, TensorProperties):
            known = len(TensorProperties().__getstate__())  # type: ignore[no-untyped-call]
            made.__setstate__(state[:known])  # type: ignore[no-untyped-call]  # a later torch adds fields that no reader needs
        else:
            vars(made).update(state)
        if isinstance(made, MetadataIndex):
            check_key((made.fqn, made.offset, made.index))  # it is a dict's key
        return True


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a complete checkpoint whose files are all there and long enough.

    Raises: CheckpointError
    """
    path = folder / METADATA
    if not path.is_file():
        raise failure(
            f"{folder} is no checkpoint: it has no {METADATA}" if folder.is_dir() else f"{folder} is no folder",
            expected="a folder that a save has finished; what one has left behind that was interrupted is named 'partial_...'",
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
        wanted: dict[str, tuple[int, str]] = {}  # of each file, where its last tensor ends, and that tensor's key
        for index, info in (metadata.storage_data or {}).items():
            wanted[info.relative_path] = max(wanted.get(info.relative_path, (0, "")), (info.offset + info.length, str(index.fqn)))
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle may raise any error
        raise failure(f"{path} cannot be read: {error}", expected="metadata as dcp.save writes them", file=path) from error
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
    return metadata


def unflatten(flat: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """The nested state that DCP took apart when it was saved: ``{"a": {"b": [1]}}`` from ``{"a.b.0": 1}``."""
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        *path, last = (metadata.planner_data or {}).get(key, (key,))
        into = root
        for part in path:
            into = into.setdefault(part, {})
        into[last] = value
    return _with_lists(root)  # type: ignore[no-any-return]


def _with_lists(node: Any) -> Any:
    """A path's string parts are keys; ints from 0 on without a gap are places in lists."""
    if not isinstance(node, dict):
        return node
    if node and all(type(key) is int for key in node) and sorted(node) == list(range(len(node))):
        return [_with_lists(node[index]) for index in range(len(node))]
    return {key: _with_lists(value) for key, value in node.items()}


def pack(value: Any, what: str) -> bytes:
    """``value`` as bytes that ``unpack`` takes. Raises: CheckpointError if it would not."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpack(buffer.getvalue())
    except Exception as error:
        raise failure(
            f"{what} cannot be saved: {str(error).strip().splitlines()[0]}",
            expected="tensors, numbers, strings and containers of these, which torch.load(weights_only=True) takes",
            fix="let its state_dict() return such values",
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value in a file of ``torch.save``, which has nothing that inflates. Raises: any error that a broken file may raise"""
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        inflated = [info.filename for info in zipped.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if inflated:
            raise ValueError(f"{inflated[0]} is compressed")
        for name in zipped.namelist():
            if name.endswith("data.pkl"):
                check_pickle(zipped.read(name))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
