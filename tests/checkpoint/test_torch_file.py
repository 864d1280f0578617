"""Files of ``torch.save``, ours and strangers': torch and zipfile read ours, and no value of a stranger's is taken for another.

Files were read as other values in silence: the right ones are read, or the file is refused.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp2.checkpoint import CheckpointError, convert, dcp_read, load_checkpoint, open_source, save_safetensors, torch_file
from fsdp2.checkpoint.file_reading import ByteReader, bytes_of
from fsdp2.checkpoint.lazy_tensors import NAMES
from fsdp2.checkpoint.shard_geometry import Box
from fsdp2.checkpoint.torch_file import described, read_torch_file
from harness.checkpoints import read


def written(tensor: Tensor) -> tuple[bytes, int]:
    description = described(tensor)
    assert description is not None
    head, tail = torch_file.around(description, bytes_of(tensor))
    return head + bytes(bytes_of(tensor)) + tail, len(head) + tensor.nbytes


@pytest.mark.parametrize("large", [2**31 - 1, 300, 10], ids=["small", "offsets of 2 GiB and more", "records, too"])
@pytest.mark.parametrize("dtype", NAMES)
def test_torch_and_zipfile_read_what_is_put_together(dtype: torch.dtype, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", large)
    torch_file.without_crc.cache_clear()
    for tensor in (torch.arange(40).view(8, 5).to(dtype), torch.ones(()).to(dtype), torch.empty(0, 3).to(dtype)):
        data, directory = written(tensor)
        found = torch.load(io.BytesIO(data), weights_only=True)
        assert found.dtype is dtype
        assert found.shape == tensor.shape
        assert bytes(bytes_of(found)) == bytes(bytes_of(tensor))
        zipped = zipfile.ZipFile(io.BytesIO(data))
        assert zipped.testzip() is None
        assert zipped.start_dir == directory
    torch_file.without_crc.cache_clear()


def test_what_a_description_would_not_tell_is_left_to_torch() -> None:
    for tensor in (torch.ones(2, dtype=torch.complex128), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse()):
        assert described(tensor) is None


def test_a_chunk_of_ours_is_read_where_it_lies_and_any_other_is_taken_apart(tmp_path: Path) -> None:
    """Symptom: a load spent most of its time in unpickling. Smallest shape: one layer, whose chunks are torch.save's or not quite."""
    torch.save(nn.Linear(8, 5).state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    model = nn.Linear(8, 5)
    with patch.object(dcp_read, "read_torch_file", side_effect=AssertionError):
        load_checkpoint(model, tmp_path / "dcp")
    expected = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    written = file.read_bytes()
    file.write_bytes(written.replace(b"FloatStorage", b"IntStorage\n\n"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(nn.Linear(8, 5), tmp_path / "dcp")
    file.write_bytes(written.replace(b"archive/version", b"archive/version"[::-1]))
    load_checkpoint(other := nn.Linear(8, 5), tmp_path / "dcp")
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


z = torch.complex(torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3))
MARKED = {
    "conj": z.conj(),
    "conj_t": z.conj().t(),
    "neg": z.clone().conj().imag,
    "neg_row": z.clone().conj().imag[1],
    "both": (1j * z).clone().conj().imag.t(),
    "neither": z.conj().conj(),
}


@pytest.mark.filterwarnings("ignore")  # of torch: that no process group is there
def test_negated_and_conjugated_views_are_read_with_their_signs(tmp_path: Path) -> None:
    """torch saves their base's elements, and bits beside these, which nobody read."""
    assert MARKED["neg"].is_neg()
    assert MARKED["conj"].is_conj()
    torch.save(MARKED | {"base": z}, tmp_path / "a.pt")
    expected = torch.load(tmp_path / "a.pt", weights_only=True)
    dcp.save(dict(MARKED), checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in (tmp_path / "a.pt", tmp_path / "dcp"):
        for to, folder in (("torch", tmp_path / "out.pt"), ("safetensors", tmp_path / "out")):
            convert(source, folder, to=to, force=True)
            found = torch.load(folder, weights_only=True) if to == "torch" else load_file(folder / "model.safetensors")
            for name, value in found.items():
                assert torch.equal(value.resolve_neg().resolve_conj(), expected[name].resolve_neg().resolve_conj()), (source, to, name)
    lazy = open_source(tmp_path / "a.pt").model["neg"]
    out = torch.empty(1, 2, dtype=torch.float64)
    with ByteReader() as reader:
        lazy.read(Box((1, 1), (2, 3)), out, reader)
    assert torch.equal(out, expected["neg"][1:2, 1:3].double())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_dtype_that_no_reader_knows_is_named(tmp_path: Path) -> None:
    """It was a tensor that "does not fit its storage", in a file that should be copied again."""
    half = torch.view_as_complex(torch.ones(3, 2, dtype=torch.float16))
    for tensor in (half, half.conj(), half.to(torch.complex128)):
        torch.save({"z": tensor}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=rf"data/0 \(3,\) is of {tensor.dtype}\n  expected: one of bool, .*complex64"):
            open_source(tmp_path / "a.pt")


@pytest.mark.parametrize("of", ["lengths and offsets", pytest.param("all that is around the data", marks=pytest.mark.full)])
def test_a_flipped_bit_in_a_zip_s_structure_gives_the_values_or_an_error(of: str, tmp_path: Path) -> None:
    """The directory's offset of a record was followed anywhere: 62 of 84 flips loaded other bytes."""
    path, damaged = tmp_path / "a.pt", tmp_path / "b.pt"
    state = {"a": torch.arange(5.0), "b": torch.arange(5.0, 9.0), "c": torch.full((70,), 3.0)}
    torch.save(state, path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as zipped:
        records = [info for info in zipped.infolist() if "/data/" in info.filename]
        places = [*range(zipped.start_dir, len(data))]
    if of == "lengths and offsets":
        entries = [data.index(info.filename.encode(), places[0]) - 46 for info in records]
        places = [place for entry in entries for place in range(entry + 42, entry + 46)]
    for info in records:
        at = info.header_offset
        places += range(at + 26, at + 30) if of == "lengths and offsets" else range(at, at + 30 + len(info.filename) + 4)
    wrong = []
    for place in places:
        for bit in range(8):
            mutant = bytearray(data)
            mutant[place] ^= 1 << bit
            damaged.write_bytes(mutant)
            try:
                found = {name: read(lazy) for name, lazy in read_torch_file(damaged).items()}
            except CheckpointError:
                continue
            if found.keys() != state.keys() or not all(torch.equal(found[name], state[name]) for name in state):
                wrong.append((place, bit))
    assert not wrong


def test_a_name_that_a_zip_has_twice_is_refused(tmp_path: Path) -> None:
    """torch.load takes the first, Python's zipfile the last."""
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    for name in ("a/data/0", "a/data.pkl"):
        shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
        with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "b.pt", "a") as zipped:
            warnings.simplefilter("ignore")
            zipped.writestr(name, zipped.read(name) if name.endswith("pkl") else bytes(12))
        with pytest.raises(CheckpointError, match=f"{name} twice"):
            convert(tmp_path / "b.pt", tmp_path / "out", to="dcp")


def test_names_that_differ_in_prefixes_of_wrappers_are_not_one_tensor(tmp_path: Path) -> None:
    one, other = torch.zeros(2), torch.ones(2)
    torch.save({"a.weight": one, "_orig_mod.a.weight": other}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.weight and _orig_mod\.a\.weight are one name"):
        open_source(tmp_path / "a.pt")
    state = {"a.weight": {"exp_avg": one}, "a._checkpoint_wrapped_module.weight": {"exp_avg": other}}
    optimizer = {"state": state, "param_groups": [{"params": list(state)}]}
    torch.save({"model": {"a.weight": one}, "optimizer": optimizer}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"_checkpoint_wrapped_module\.weight are one name"):
        open_source(tmp_path / "b.pt")


def test_flat_parts_of_two_ranks_under_exchanged_names_are_refused(tmp_path: Path) -> None:
    for rank in range(3):
        torch.save({"a": torch.arange(4.0) + 4 * rank}, tmp_path / f"model_rank{rank}.pt")
    shapes = {"a": (3, 4)}
    assert open_source(tmp_path, shapes=shapes).model["a"].shape == (3, 4)
    for rank in range(3):  # under names that none of them was saved as
        (tmp_path / f"model_rank{rank}.pt").rename(tmp_path / f"part{rank}.pt")
    assert open_source(tmp_path, shapes=shapes).model["a"].shape == (3, 4)
    for rank in range(3):
        (tmp_path / f"part{rank}.pt").rename(tmp_path / f"model_rank{rank}.pt")
    shutil.copy(tmp_path / "model_rank0.pt", tmp_path / "model_rank2.pt")
    with pytest.raises(CheckpointError, match=r"model_rank2\.pt was saved as model_rank0\.pt"):
        open_source(tmp_path, shapes=shapes)


def test_each_rank_s_dict_with_the_whole_model_is_read(tmp_path: Path) -> None:
    """ "It has no tensors of a model", of files of the form that one rank alone may have."""
    state = nn.Linear(3, 2).state_dict()
    for rank in range(2):
        torch.save({"model": state, "epoch": 3}, tmp_path / f"checkpoint_rank{rank}.pt")
    assert {name: lazy.shape for name, lazy in open_source(tmp_path).model.items()} == {"weight": (2, 3), "bias": (2,)}


def test_a_pipe_in_the_place_of_a_config_is_not_waited_for(tmp_path: Path) -> None:
    class Config:
        def save_pretrained(self, folder: Any) -> None:
            Path(folder, "config.json").write_text("{}")

    model = nn.Linear(2, 2)
    model.config = Config()  # type: ignore[assignment]
    os.mkfifo(tmp_path / "config.json")
    save_safetensors(model, tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
