"""Damage to a checkpoint's bytes is noticed where it has digests, wherever it falls; what has none is said."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from fsdp2 import fully_shard
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    convert,
    load_checkpoint,
    load_safetensors,
    open_source,
    save_full_state,
    save_safetensors,
    verify,
)
from fsdp2.checkpoint.digests import FileDigest, read_digests, write_digests
from fsdp2.cli import main
from harness import cpu_mesh, on_ranks
from harness.checkpoints import on_rank_0
from harness.models import mlp

quiet_dcp = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def written(folder: Path, kind: str) -> Path:
    """A checkpoint of each kind of file that we write."""
    folder.mkdir()
    if kind == "safetensors":
        save_safetensors(mlp(), folder / "out", "2KB")
    elif kind == "torch.save":
        save_full_state(folder / "out", mlp())
    else:
        save_full_state(folder / "full.pt", mlp())
        convert(folder / "full.pt", folder / "out", to=kind)
    return folder / "out"


KINDS = ["safetensors", "torch.save", "dcp", "torch"]


@quiet_dcp
@pytest.mark.parametrize("kind", KINDS)
def test_any_bit_that_changes_is_noticed_or_means_nothing(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a", kind)
    whole = verify(path)
    assert whole.nbytes >= sum(value.nbytes for value in mlp().state_dict().values())
    assert not whole.unchecked
    expected = load_values(path)
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.suffix != ".json"]
    for file in files:
        nbytes = file.stat().st_size
        for at in {*range(0, nbytes, nbytes // 40), *range(20), nbytes - 1, nbytes - 30}:
            flip(file, at)
            with contextlib.suppress(CheckpointError):
                verify(path)  # it may pass a zip's date, for instance
                assert all(torch.equal(value, expected[name]) for name, value in load_values(path).items())
            flip(file, at)
    verify(path)


def load_values(path: Path) -> dict[str, Any]:
    model = mlp(seed=7)
    load_checkpoint(model, path)
    return model.state_dict()


@on_ranks(2)
def test_a_checkpointer_notices_damage_before_anything_is_changed(tmp_path: Path) -> None:
    model = fully_shard(mlp(), mesh=cpu_mesh())
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
        checkpointer.load(verify=True)
        path = checkpointer.latest()
        assert path is not None
        assert verify(tmp_path).nbytes > 0
        on_rank_0(lambda: flip(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size // 2))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(2.0)
        with pytest.raises(CheckpointError, match=r"is damaged in 1 places(?s:.*)__1_0\.distcp: \w+"):
            checkpointer.load(verify=True)
        assert all((param.to_local() == 2.0).all() for param in model.parameters())


@on_ranks(2)
def test_files_and_metadata_that_were_exchanged_are_noticed(tmp_path: Path) -> None:
    """Each is whole by itself."""
    model = fully_shard(mlp(), mesh=cpu_mesh())
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        checkpointer.save(2)
        checkpointer.wait()
    if dist.get_rank() == 0:
        first, second = tmp_path / "step_000001", tmp_path / "step_000002"
        shutil.copytree(second, tmp_path / "other")
        shutil.copy(first / "__1_0.distcp", second / "__1_0.distcp")
        shutil.copy(first / ".metadata", tmp_path / "other" / ".metadata")
        verify(first)
        with pytest.raises(CheckpointError, match="damaged"):
            verify(second)
        with pytest.raises(CheckpointError, match=r"\.metadata: the file has the CRC-32"):
            verify(tmp_path / "other")
        shutil.copy(first / "digests.json", second / "digests.json")
        told = json.loads((first / "digests.json").read_text())
        told["files"][".metadata"]["nbytes"] += 1
        (first / "digests.json").write_text(json.dumps(told))
        with pytest.raises(CheckpointError, match="its own CRC-32 does not match"):
            verify(first)


@on_ranks(2)
@pytest.mark.parametrize("num_writers", [1, None])
def test_sharded_models_are_written_with_digests_and_compared_when_loaded(num_writers: int | None, tmp_path: Path) -> None:
    model = fully_shard(mlp(), mesh=cpu_mesh())
    save_safetensors(model, tmp_path, "1KB", num_writers=num_writers)
    assert verify(tmp_path).unchecked == ()
    report = load_safetensors(model, tmp_path, verify=True)
    assert report.loaded
    dist.barrier()
    file = max(tmp_path.glob("*.safetensors"))
    on_rank_0(lambda: flip(file, file.stat().st_size - 3, bit=6))
    with pytest.raises(CheckpointError, match="is damaged in 1 places") as caught:
        load_safetensors(model, tmp_path, verify=True)
    assert caught.value.file == str(file)


def test_others_files_have_no_digests_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert verify(tmp_path).unchecked == ("model.safetensors: the header", "model.safetensors: a")
    assert main(["verify", str(tmp_path)]) == 0
    assert "no digest: model.safetensors: a" in capsys.readouterr().out
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert len(verify(tmp_path / "a.pt").unchecked) == 1
    assert list(open_source(tmp_path / "a.pt").model) == ["a"]  # zipfile took such files for damaged
    convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "b.pt")["a"], torch.ones(3))


def test_an_index_that_has_lost_a_key_is_noticed(tmp_path: Path) -> None:
    """Found by a mutant: the index was whole JSON, and a tensor missing."""
    saved = save_safetensors(mlp(), tmp_path, "1KB")
    path = saved.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][next(iter(index["weight_map"]))]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: the index has the CRC-32"):
        verify(tmp_path)


def test_the_command_fails_for_damage_and_names_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_safetensors(mlp(), tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    file = tmp_path / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    assert main(["verify", str(tmp_path)]) == 1
    with safe_open(file, "pt") as opened:
        last = max(opened.keys(), key=lambda key: json.loads(header(file))[key]["data_offsets"][1])
    assert f"model.safetensors: {last} has the CRC-32" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="is damaged"):
        convert(file, tmp_path / "out.pt", to="torch", verify=True)


def header(file: Path) -> bytes:
    data = file.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@on_ranks(1)
def test_what_a_save_has_not_finished_is_no_checkpoint_of_the_folder(tmp_path: Path) -> None:
    """A crash behind the metadata left one; a run that is saving has one too. Whole folders could not be compared or converted."""
    run, left = tmp_path / "run", tmp_path / "run" / f"partial_{'0' * 32}"
    with Checkpointer(run, fully_shard(mlp(), mesh=cpu_mesh())) as checkpointer:
        checkpointer.save(1)
    shutil.copytree(run / "step_000001", left)
    shutil.copytree(run / "step_000001", run / ".out.0123abcd.partial")
    (left / "__0_0.distcp").write_bytes(b"")
    assert main(["verify", str(run)]) == 0
    convert(run, tmp_path / "out.pt", to="torch")
    shutil.rmtree(run / "step_000001")
    with pytest.raises(CheckpointError, match="step_000001 has no checkpoint"):
        verify(run)
    (run / "latest").unlink()
    with pytest.raises(CheckpointError, match="is not a checkpoint of a known format"):
        verify(run)


@on_ranks(1)
def test_every_damaged_checkpoint_of_a_folder_is_named(tmp_path: Path) -> None:
    """The first whose metadata could not be read hid the others."""
    with Checkpointer(tmp_path, fully_shard(mlp(), mesh=cpu_mesh()), keep_last=None) as checkpointer:
        for step in range(4):
            checkpointer.save(step)
    (tmp_path / "step_000000" / ".metadata").write_bytes(b"nothing")
    data = tmp_path / "step_000001" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    flip(tmp_path / "step_000002" / "__0_0.distcp", 2000)
    with pytest.raises(CheckpointError, match="is damaged in") as caught:
        verify(tmp_path)
    text = str(caught.value)
    assert "step_000000/.metadata: " in text
    assert "step_000001/__0_0.distcp: " in text
    shutil.rmtree(tmp_path / "step_000000")
    shutil.rmtree(tmp_path / "step_000001")
    with pytest.raises(CheckpointError, match=r"step_000002/__0_0\.distcp: "):
        verify(tmp_path)


def test_one_file_stands_for_those_of_all_ranks(tmp_path: Path) -> None:
    """As it does for readers: the values of the other ranks' files are loaded, too."""
    for rank in range(2):
        torch.save({"_flat_param": torch.arange(1000.0)}, tmp_path / f"model_rank{rank}.pt")
    first, second = tmp_path / "model_rank0.pt", tmp_path / "model_rank1.pt"
    assert verify(first).nbytes == first.stat().st_size + second.stat().st_size
    flip(second, second.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model_rank1\.pt: "):
        verify(first)
    flip(second, second.stat().st_size // 2)
    flip(second, 0)
    for path in (first, tmp_path):
        with pytest.raises(CheckpointError, match=r"model_rank1\.pt does not begin like a file of torch\.save"):
            verify(path)


def test_digests_lead_to_no_file_outside_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1234")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_digests(folder, {"../secret": FileDigest(4, 1)}, [])
    with pytest.raises(CheckpointError, match=r"names '\.\./secret', outside of its folder"):
        read_digests(folder)


def test_digests_of_a_header_that_are_damaged_name_the_file(tmp_path: Path) -> None:
    save_safetensors(mlp(), tmp_path)
    file = tmp_path / "model.safetensors"
    flip(file, file.read_bytes().index(b'crc32":"') + 8, bit=6)
    with pytest.raises(CheckpointError) as caught:
        verify(tmp_path)
    assert caught.value.file == str(file)
