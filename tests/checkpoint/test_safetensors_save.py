"""``save_safetensors``: the library's own reader finds the unsharded model's values, and no rank holds more than it should."""

from __future__ import annotations

import itertools
import json
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2.checkpoint.safetensors_save as save
from fsdp2 import ArgumentError, CPUOffloadPolicy, MaterializationError, fully_shard
from fsdp2.checkpoint import CheckpointError, load_safetensors, save_safetensors
from fsdp2.checkpoint.safetensors_plan import nbytes_of, writers_of
from harness import cpu_mesh, on_ranks
from harness.checkpoints import Odd
from harness.memory import PeakBytes
from harness.models import mlp, transformer
from harness.sharding import shard_blocks
from harness.training import assert_same_tensors

INDEX = "model.safetensors.index.json"


def read_all(folder):
    """All tensors of a checkpoint, by safetensors itself."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors = {}
    for name in sorted(set(weight_map.values())):
        content = load_file(folder / name)
        assert {key for key, file in weight_map.items() if file == name} == content.keys()
        tensors |= content
    return tensors


# --- what is in the files -------------------------------------------------------------------------------------------------------


@on_ranks(1, 3)
@pytest.mark.parametrize("max_shard_size", ["5GB", 1000])
@pytest.mark.parametrize("num_writers", [1, 2, None])
@pytest.mark.parametrize("buffer_nbytes", [64 << 20, 100], ids=["whole", "bands"])
def test_files_hold_the_unsharded_values(tmp_path, max_shard_size, num_writers, buffer_nbytes):
    model = shard_blocks(mlp())
    with patch.object(save, "BUFFER_NBYTES", buffer_nbytes):
        saved = save_safetensors(model, tmp_path / "new" / "folder", max_shard_size, num_writers=num_writers)
    expected = mlp().state_dict()
    assert_same_tensors(read_all(saved.folder), expected, "value")
    names = {*saved.files, *([INDEX] if max_shard_size == 1000 else [])}
    assert {path.name for path in saved.folder.iterdir()} == names
    assert saved.nbytes == sum(value.nbytes for value in expected.values())
    for name in saved.files:
        with safe_open(saved.folder / name, framework="pt") as file:
            assert file.metadata().keys() == {"format", "fsdp2_crc32"}
            assert file.metadata()["format"] == "pt"
        assert len(load_file(saved.folder / name)) == 1 or sum(v.nbytes for v in load_file(saved.folder / name).values()) <= nbytes_of(
            max_shard_size
        )
    if max_shard_size == 1000:
        index = json.loads((saved.folder / INDEX).read_text())
        assert index["metadata"].pop("fsdp2_crc32")
        assert index["metadata"] == {"total_parameters": sum(v.numel() for v in expected.values()), "total_size": saved.nbytes}
        assert len(saved.files) > 3


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("buffer_nbytes", [64 << 20, 16], ids=["whole", "bands"])
def test_odd_tensors(tmp_path, dim, buffer_nbytes):
    """Of ties the first name; no non-persistent buffer; each tensor begins at a multiple of its itemsize."""
    model = Odd()
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1 if dim else 0) if p.ndim else None)
    with patch.object(save, "BUFFER_NBYTES", buffer_nbytes):
        saved = save_safetensors(model, tmp_path)
    expected = Odd().state_dict()
    del expected["two.weight"]
    assert_same_tensors(read_all(tmp_path), expected, "value")
    text = (tmp_path / saved.files[0]).read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert all(expected[key].itemsize * (entry["data_offsets"][0] // expected[key].itemsize) == entry["data_offsets"][0]
               for key, entry in header.items() if key != "__metadata__")  # fmt: skip


@on_ranks(4)
@pytest.mark.parametrize("num_writers", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hidden", [8, 5, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (10, 3))])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 2, 2)], ids=str)
def test_meshes_of_several_axes(tmp_path, hidden, num_writers, shape):
    def make():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 6))

    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "shard", "tp")
    mesh = cpu_mesh(*shape, names=names)
    model = make()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh[names[:-1]] if len(shape) == 3 else mesh["dp"])
    with patch.object(save, "BUFFER_NBYTES", 200):
        save_safetensors(model, tmp_path, 150, num_writers=num_writers)
    assert_same_tensors(read_all(tmp_path), make().state_dict(), "value")


@on_ranks(4)
def test_hsdp_offload_upstream_and_unsharded_models(tmp_path):
    expected = mlp().state_dict()
    for index, kind in enumerate(("hsdp", "offload", "upstream", "plain")):
        model = mlp()
        if kind == "hsdp":
            shard_blocks(model, mesh=cpu_mesh(2, 2))
        if kind == "offload":
            shard_blocks(model, offload_policy=CPUOffloadPolicy())
        if kind == "upstream":
            torch.distributed.fsdp.fully_shard(model, mesh=cpu_mesh())
            model(torch.randn(2, 7))  # leaves the root unsharded
        save_safetensors(model, tmp_path / str(index), 1000, num_writers=None)
        assert_same_tensors(read_all(tmp_path / str(index)), expected, "value")


@on_ranks(2)
def test_converted_to_another_dtype(tmp_path):
    model = Odd()
    fully_shard(model, mesh=cpu_mesh())
    save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    expected = {key: value.bfloat16() if value.is_floating_point() else value for key, value in Odd().state_dict().items()}
    del expected["two.weight"]
    assert_same_tensors(read_all(tmp_path), expected, "value")


@on_ranks(2, 3)
def test_round_trip_between_meshes_and_ties(tmp_path, world_size):
    """Trained a step, saved; loaded from the meta device into a model cut in another way."""
    model = transformer(tied=True)
    fully_shard(model.embedding, mesh=cpu_mesh())
    shard_blocks(model)
    ids = torch.randint(11, (4, 5))
    model(ids).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    save_safetensors(model, tmp_path, 300, num_writers=None)
    with torch.device("meta"):
        other = transformer(tied=True)
    shard_blocks(other, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    load_safetensors(other, tmp_path)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    torch.testing.assert_close(other(ids), model(ids))


@on_ranks(4)
def test_only_the_ranks_of_a_process_group_save(tmp_path):
    """Two models on two ranks each, as pipeline stages are."""
    mesh = cpu_mesh(2, 2, names=("stage", "dp"))
    stage = mesh["stage"].get_local_rank()
    model = mlp(seed=stage)
    shard_blocks(model, mesh=mesh["dp"])
    save_safetensors(model, tmp_path / str(stage), 1000, num_writers=None, process_group=mesh["dp"].get_group())
    assert_same_tensors(read_all(tmp_path / str(stage)), mlp(seed=stage).state_dict(), "value")


# --- memory ---------------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("num_writers", [1, None])
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_is_bounded_whatever_the_size_of_a_parameter(tmp_path, num_writers, dim):
    """A parameter of 16 buffers: what is allocated beside the shards stays below two."""
    buffer_nbytes = 1 << 16
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=lambda p: Shard(dim))
    with patch.object(save, "BUFFER_NBYTES", buffer_nbytes), PeakBytes() as memory:
        memory.touch(list(model.parameters()))
        before = memory.peak
        save_safetensors(model, tmp_path, 1 << 20, num_writers=num_writers)
    dist.barrier()
    assert memory.peak - before <= 2 * buffer_nbytes + 4096  # and what the ranks agree on
    torch.manual_seed(0)
    expected = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    assert_same_tensors(read_all(tmp_path), expected.state_dict(), "value")


# --- arguments, and what cannot be saved ----------------------------------------------------------------------------------------


def test_sizes_and_writers():
    sizes = {"5GB": 5 * 10**9, "1.5 MiB": 1572864, 7: 7, "300": 300, "2kb": 2000}
    assert {size: nbytes_of(size) for size in sizes} == sizes
    for wrong in ("", "GB", "5XB", -1, 0, True, None, "-5GB", 1.5):
        with pytest.raises(ArgumentError, match="max_shard_size"):
            nbytes_of(wrong)
    assert writers_of(8, 2) == [0, 4]
    assert writers_of(3, None) == [0, 1, 2]
    assert writers_of(3, 9) == [0, 1, 2]


def _alone():
    """A process group of this rank only."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


@on_ranks(2)
def test_what_cannot_be_saved_is_an_error_on_every_rank_and_leaves_nothing(tmp_path):
    with torch.device("meta"):
        on_meta = mlp()
    complex_model = nn.Module()
    complex_model.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex128))
    differing = nn.Linear(3, 3 + dist.get_rank())
    cases = [
        (on_meta, {}, MaterializationError, "first.weight"),
        (complex_model, {}, CheckpointError, "weight: torch.complex128"),
        (differing, {}, CheckpointError, r"ranks \[1\] have a model with names"),
        (fully_shard(mlp(), mesh=cpu_mesh()), {"process_group": _alone()}, ArgumentError, "not in process_group"),
        (mlp(), {"num_writers": 0}, ArgumentError, "num_writers"),
        (mlp(), {"dtype": torch.int8}, ArgumentError, "dtype"),
        (mlp(), {"max_shard_size": "5 apples"}, ArgumentError, "apples"),
        ("model", {}, ArgumentError, "nn.Module"),
    ]
    for model, options, error, text in cases:
        with pytest.raises(error, match=text):
            save_safetensors(model, tmp_path / "folder", **options)
    dist.barrier()
    assert list(itertools.chain(*(path.iterdir() for path in tmp_path.iterdir()))) == []
