"""Files of ``torch.save`` that are put together around a tensor's bytes: torch and zipfile read them, small and large."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fsdp2.checkpoint.readers.dcp as dcp_reader
import fsdp2.checkpoint.torch_zip as torch_zip
from fsdp2.checkpoint import CheckpointError, convert, load_checkpoint
from fsdp2.checkpoint.byte_ranges import bytes_of
from fsdp2.checkpoint.safetensors_format import NAMES
from fsdp2.checkpoint.torch_pickle import described


def written(tensor: Tensor) -> tuple[bytes, int]:
    description = described(tensor)
    assert description is not None
    head, tail = torch_zip.around(description, bytes_of(tensor))
    return head + bytes(bytes_of(tensor)) + tail, len(head) + tensor.nbytes


@pytest.mark.parametrize("large", [2**32 - 1, 300, 10], ids=["small", "offsets of 4 GiB and more", "records, too"])
@pytest.mark.parametrize("dtype", NAMES)
def test_torch_and_zipfile_read_what_is_put_together(dtype: torch.dtype, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "LARGE", large)
    for tensor in (torch.arange(40).view(8, 5).to(dtype), torch.ones(()).to(dtype), torch.empty(0, 3).to(dtype)):
        data, directory = written(tensor)
        found = torch.load(io.BytesIO(data), weights_only=True)
        assert found.dtype is dtype
        assert found.shape == tensor.shape
        assert bytes(bytes_of(found)) == bytes(bytes_of(tensor))
        zipped = zipfile.ZipFile(io.BytesIO(data))
        assert zipped.testzip() is None
        assert zipped.start_dir == directory


def test_what_a_description_would_not_tell_is_left_to_torch() -> None:
    for tensor in (torch.ones(2, dtype=torch.complex128), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse()):
        assert described(tensor) is None


def test_a_chunk_of_ours_is_read_where_it_lies_and_any_other_is_taken_apart(tmp_path: Path) -> None:
    """Symptom: a load spent most of its time in unpickling. Smallest shape: one layer, whose chunks are torch.save's or not quite."""
    torch.save(nn.Linear(8, 5).state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    model = nn.Linear(8, 5)
    with patch.object(dcp_reader, "read_torch_file", side_effect=AssertionError):
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
