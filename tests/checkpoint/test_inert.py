"""A file that is refused, or read, leaves the process as it was.

Symptom: a pickle's BUILD set ``__defaults__`` of our own function, or attributes of ``PosixPath`` and of torch's classes; each honest
file that came after had the tensors of the attacker.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint import CheckpointError, open_source
from fsdp2.checkpoint.dcp_read import read_metadata
from fsdp2.checkpoint.inert_pickle import Inert, unpickle

START = b"\x80\x02"
ATTRIBUTES = [
    b"}X\x0d\x00\x00\x00set_by_pickleK\x01s",  # {"set_by_pickle": 1}
    b"N}X\x0d\x00\x00\x00set_by_pickleK\x01s\x86",  # (None, {"set_by_pickle": 1}), as for slots
]
NAMES = [
    "collections OrderedDict",
    "collections defaultdict",
    "torch Size",
    "torch float32",
    "torch FloatStorage",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch._tensor _rebuild_from_type_v2",
    "builtins set",
    "builtins dict",
    "builtins getattr",
    "_codecs encode",
    "pathlib PosixPath",
    "torch.serialization _get_layout",
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    *(
        f"torch.distributed.checkpoint.metadata {name}"
        for name in ("_MEM_FORMAT_ENCODING", "Metadata", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata", "StorageMeta")
    ),
]


def named(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


OBJECTS = {name: named(name) for name in NAMES} | {
    "a class through a function": named("torch._utils _rebuild_parameter") + named("collections OrderedDict") + b"\x85R",
    "a member of an enum": named("torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING") + b"K\x00\x85R",
    "a nested class": named("builtins getattr") + named("a B") + b"X\x01\x00\x00\x00C\x86R",
    "a class of a stranger": named("a B"),
    "a path": named("pathlib PosixPath") + b"X\x01\x00\x00\x00a\x85R",
    "a tensor": named("torch._utils _rebuild_tensor_v2")
    + b"((X\x07\x00\x00\x00storage"
    + named("torch FloatStorage")
    + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00K\x01\x85K\x01\x85\x89NtR",
}


def test_a_pickle_gives_attributes_to_what_it_has_made_alone(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    for what, attributes in itertools.product(OBJECTS, ATTRIBUTES):
        data = START + OBJECTS[what] + attributes + b"b."
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as zipped:
            zipped.writestr("archive/data.pkl", data)
            zipped.writestr("archive/data/0", bytes(4))
        (tmp_path / "dcp" / ".metadata").write_bytes(data)
        for path in (tmp_path / "a.pt", tmp_path / "dcp"):
            with pytest.raises(CheckpointError):
                open_source(path)
    changed = [each for each in gc.get_objects() if "set_by_pickle" in _attributes(each)]
    assert not changed


def _attributes(thing: Any) -> Any:
    try:
        return list(object.__getattribute__(thing, "__dict__"))
    except Exception:  # has none
        return ()


def test_what_it_has_made_gets_its_attributes(tmp_path: Path) -> None:
    state = OrderedDict(a=torch.ones(2))
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    torch.save({"model": state, "args": Path, "other": Slotted(3), "more": [Slotted(4)]}, tmp_path / "a.pt")
    assert list(open_source(tmp_path / "a.pt").model) == ["a"]
    for protocol in range(2, 6):
        made: Any = unpickle(pickle.dumps([Slotted(3), Slotted(4), "x" * 100_000, Slotted(5)], protocol), lambda saved: saved)
        assert [each.fields["value"] for each in made if isinstance(each, Inert)] == [3, 4, 5]


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_fields_of_metadata_are_what_torch_reads(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3, 2), "b": [1, {"c": 2}]}, checkpoint_id=tmp_path, no_dist=True)
    ours, theirs = read_metadata(tmp_path), pickle.loads((tmp_path / ".metadata").read_bytes())
    assert ours == theirs
    assert isinstance(ours.state_dict_metadata["a"], TensorStorageMetadata)
