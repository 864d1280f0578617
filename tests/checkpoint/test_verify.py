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
    save_full_state,
    save_safetensors,
    verify,
)
from fsdp2.cli import main
from harness import cpu_mesh, on_ranks
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
        dist.barrier()
        if dist.get_rank() == 0:
            flip(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size // 2)
        dist.barrier()
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
        with pytest.raises(CheckpointError, match="its own CRC-32 is another one"):
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
    if dist.get_rank() == 0:
        flip(file, file.stat().st_size - 3, bit=6)
    dist.barrier()
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
