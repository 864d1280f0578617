"""Small files that would cost much: readers refuse them, or take them for what they are, in little time and memory."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from fsdp2.checkpoint import convert, load_safetensors, open_source
from fsdp2.checkpoint.dcp_read import unpack
from fsdp2.checkpoint.inert_pickle import unpickle
from harness.bounded import Outcome, bounded

MAX_GROWTH = 200 << 20
MAX_SECONDS = 5.0


def refused(action: Callable[[], Any]) -> str:
    """The text of the error, which came in time."""
    outcome = bounded(action)
    assert outcome.crash is None, outcome.crash
    assert_bounded(outcome)
    assert outcome.error is not None, "nothing was refused"
    return outcome.error


def assert_bounded(outcome: Outcome) -> None:
    assert outcome.growth < MAX_GROWTH
    assert outcome.seconds < MAX_SECONDS


def torch_zip(path: Path, description: bytes, *, compression: int = zipfile.ZIP_STORED, byteorder: bytes = b"little") -> Path:
    """A file of ``torch.save``'s format with the given ``data.pkl``, and a storage of 1 KB."""
    with zipfile.ZipFile(path, "w", compression, compresslevel=1) as zipped:
        zipped.writestr("archive/data.pkl", description)
        zipped.writestr("archive/byteorder", byteorder)
        zipped.writestr("archive/data/0", bytes(1024))
        zipped.writestr("archive/version", b"3\n")
    return path


def opened(path: Path) -> Callable[[], Any]:
    return lambda: open_source(path).format


@pytest.mark.parametrize("name", ["data.pkl", "byteorder"])
def test_compressed_entries_are_not_inflated(name: str, tmp_path: Path) -> None:
    large = bytes(250_000_000)
    path = torch_zip(
        tmp_path / "a.pt",
        pickle.dumps({}, 2) + (large if name == "data.pkl" else b""),
        compression=zipfile.ZIP_DEFLATED,
        byteorder=large if name == "byteorder" else b"little",
    )
    assert path.stat().st_size < 2_000_000
    assert "compressed" in refused(opened(path))


def test_a_name_that_occurs_often_in_a_header_is_found_in_linear_time(tmp_path: Path) -> None:
    """All names were counted for each: 200 000 pairs took an hour."""
    pairs = ",".join(f'"k{index}":0' for index in range(200_000))
    text = ("{" + pairs + ',"k199999":0}').encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert "'k199999' occurs twice" in refused(opened(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "'a' occurs twice" in refused(opened(tmp_path))


def shared(levels: int, make: Callable[[Any], Any]) -> Any:
    node: Any = "end"
    for _ in range(levels):
        node = make(node)
    return node


def test_numbers_of_one_hash_are_no_keys() -> None:
    """Integers that are equal modulo 2**61 - 1 have one hash: a dict of n of them takes n**2 steps."""
    with pytest.raises(pickle.UnpicklingError, match="8 bytes"):
        unpickled(pickle.dumps({index * (2**61 - 1): 0 for index in range(100)}, 2))
    unpickled(pickle.dumps(dict.fromkeys(range(100), 2**200), 2))


def unpickled(data: bytes) -> Any:
    return unpickle(data, lambda saved: saved)


KEY = pickle.dumps(shared(40, lambda x: (x, x)), 2)[2:-1]  # forty levels of shared tuples take 2**40 steps to hash
ENDLESS: dict[str, Any] = {}
ENDLESS["model"] = ENDLESS
LONG = b"\x80\x02(" + b"N" * 100_000 + b"tq\x00"  # a tuple of 100 000 Nones, memoized as 0
CALLS = {  # each kept 800 KB: 14 bytes of the file
    "a copy": b"cbuiltins\nlist\nh\x00\x85R",
    "arguments": b"ca\nB\nh\x00R",
    "new": b"ca\nB\nh\x00\x81",
    "new with keywords": b"ca\nB\nh\x00}\x92",
    "an object": b"(ca\nB\nh\x00o",
    "a class": b"(h\x00itorch\nSize\n",
}
PICKLES: dict[str, tuple[bytes, str]] = {
    "a memo index, for which 2 GiB were written": (b"\x80\x02Nr" + struct.pack("<I", 2**27) + b".", ""),
    "shared dicts": (pickle.dumps({"model": shared(40, lambda x: {"a": x, "b": x})}, 2), "shared again and again"),
    "shared lists": (pickle.dumps({"model": shared(40, lambda x: [x, x])}, 2), "shared again and again"),
    "shared tuples": (pickle.dumps({"model": shared(40, lambda x: (x, x))}, 2), "shared again and again"),
    "a dict's key": (b"\x80\x02}" + KEY + b"Ns.", "100 parts"),
    "a set's member": (b"\x80\x04\x8f(" + KEY + b"\x90.", "100 parts"),
    "an argument of a set": (b"\x80\x02c__builtin__\nset\n]" + KEY + b"a\x85R.", "100 parts"),
    "an argument of a dict": (b"\x80\x02ccollections\nOrderedDict\n]" + KEY + b"N\x86a\x85R.", "100 parts"),
    **{f"calls: {name}": (LONG + b"](" + call * 20_000 + b"e.", "again and again") for name, call in CALLS.items()},
    "a bytearray whose bytes are not there": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".", ""),
    "deep containers": (pickle.dumps({"model": shared(300, lambda x: {"a": x})}, 2), "nested more than 100 deep"),
    "endless containers": (pickle.dumps(ENDLESS, 2), "contains itself"),
    "many classes": (b"\x80\x02" + b"".join(b"cA\n%x\n0" % index for index in range(200_000)) + b"N.", "more than 10000 classes"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_cost_more_than_their_length_are_refused(name: str, tmp_path: Path) -> None:
    """By the reader of torch.save's files with the reason, and by that of DCP's metadata."""
    data, text = PICKLES[name]
    assert text in refused(opened(torch_zip(tmp_path / "a.pt", data)))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(data)
    refused(opened(tmp_path / "dcp"))


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_of_a_program_passes(protocol: int) -> None:
    """What pickle itself writes is within the limits."""
    state = collections.OrderedDict(a=[1, -1, 2**40, 2**300, 1.5, True, None, "x" * 300, b"y" * 300, (1, 2, 3, 4), {5}, frozenset({6})])
    objects: list[Any] = [state, state, Path("x"), torch.Size([2]), collections.defaultdict(list), bytearray(b"z"), 1j, {(1, "a"): 2}]
    found = unpickled(pickle.dumps(objects, protocol))
    assert found[0] is found[1]
    assert (found[0], found[4], *found[6:]) == (state, {}, *objects[6:])
    for cut in range(len(pickle.dumps(objects, protocol))):
        with pytest.raises(Exception):  # noqa: B017 -- any: readers name the file
            unpickled(pickle.dumps(objects, protocol)[:cut])


@pytest.mark.parametrize(
    "name", ["model.safetensors", "a.safetensors", "latest", "x_optim_states.pt", ".metadata", "a.pt", "model-00001-of-00002.bin"]
)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    refused(opened(tmp_path))
    refused(opened(tmp_path / name))


def test_a_pipe_or_device_that_another_file_names_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    (tmp_path / "b.safetensors").symlink_to("/dev/zero")
    refused(opened(tmp_path))
    refused(lambda: load_safetensors(nn.Linear(2, 2), tmp_path))


def test_a_tensor_that_repeats_its_elements_is_not_written_out(tmp_path: Path) -> None:
    """1 KB on disk, 256 GB for whoever converts it."""
    torch.save({"a": torch.zeros(256).expand(2**28, 256)}, tmp_path / "a.pt")
    message = refused(lambda: convert(tmp_path / "a.pt", tmp_path / "out", to="safetensors"))
    assert "repeats the 1024 bytes" in message
    torch.save({"a": torch.arange(3.0).expand(5, 3)}, tmp_path / "b.pt")
    convert(tmp_path / "b.pt", tmp_path / "b", to="safetensors")
    assert load_file(tmp_path / "b" / "model.safetensors")["a"].equal(torch.arange(3.0).expand(5, 3))


def test_one_storage_under_many_names_is_not_written_out_for_each(tmp_path: Path) -> None:
    storage = torch.zeros(200_000)
    torch.save({f"name{index}": storage for index in range(2000)}, tmp_path / "a.pt")  # 0.8 MB, and 1.6 GB for DCP, which knows no ties
    message = refused(lambda: convert(tmp_path / "a.pt", tmp_path / "out", to="dcp"))
    assert "at most 64 times as much" in message
    assert not (tmp_path / "out").exists()


def dcp_folder(path: Path, change: Callable[[Metadata], None]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: that no process group is there
        dcp.save({"a": torch.zeros(4, 2), "b": {"c": 1}}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def test_a_place_of_many_parts_is_refused_in_time_and_memory(tmp_path: Path) -> None:
    """A place of n parts cost n * n / 2 pointers: 80 KB of them 2.9 GiB."""

    def change(metadata: Metadata) -> None:
        assert metadata.planner_data is not None
        metadata.planner_data["a"] = tuple(range(40_000))

    assert "at most 100 keys" in refused(opened(dcp_folder(tmp_path / "a", change)))


def test_boxes_that_meet_are_found_in_linear_time(tmp_path: Path) -> None:
    """Each was compared with all that lie across the same row."""
    n = 20_000

    def change(metadata: Metadata) -> None:
        chunks = [ChunkStorageMetadata(torch.Size([each, each]), torch.Size([n, 1])) for each in range(n)]
        chunks[-1] = chunks[0]
        found = metadata.state_dict_metadata["a"]
        assert isinstance(found, TensorStorageMetadata)
        metadata.state_dict_metadata["a"] = TensorStorageMetadata(found.properties, torch.Size([2 * n, n // 2]), chunks)
        chunks[:] = [each for each in chunks if each.offsets[1] < n // 2]
        chunks += chunks[: n - len(chunks)]

    assert "overlap" in refused(opened(dcp_folder(tmp_path / "a", change)))


def test_values_beside_the_tensors_are_not_inflated(tmp_path: Path) -> None:
    """What is no tensor went to torch.load, which inflates 250 KB to 250 MB."""
    path = torch_zip(tmp_path / "a.pt", pickle.dumps({}, 2) + bytes(250_000_000), compression=zipfile.ZIP_DEFLATED)
    data = path.read_bytes()
    outcome = bounded(lambda: unpack(data))
    assert "is compressed" in (outcome.crash or "")
    assert_bounded(outcome)


@pytest.mark.parametrize(
    "name", ["model-00001-of-99999999999.bin", "rank_99999999999.pt", "zero_pp_rank_99999999999_mp_rank_00_optim_states.pt"]
)
def test_numbers_in_names_of_files_are_not_counted_up_to(name: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, buffer)
    (tmp_path / name).write_bytes(buffer.getvalue())
    assert "0, 1, 2" in refused(opened(tmp_path)) or "2, 3, 4" in refused(opened(tmp_path))
