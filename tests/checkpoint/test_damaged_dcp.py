"""Metadata of DCP that do not describe a whole checkpoint are refused by every reader, before anything is allocated or changed.

Symptom: a tensor whose chunks did not cover it came out with what was in memory before. Cause: readers filled what the chunks said and
compared at most the number of elements. Smallest shape: one (4, 2) parameter with no chunks, or with rows [0, 2) twice.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointError, convert, load_checkpoint, open_source
from fsdp2.checkpoint.checkpoint_folder import CheckpointFolder
from fsdp2.checkpoint.shard_geometry import Box, cover_problem
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.training import adamw, assert_same_tensors, fed_own_chunk

WEIGHT, MOMENT = "model.last.weight", "optimizer.state.last.weight.exp_avg"


def chunks_of(metadata: Metadata, key: str) -> list[ChunkStorageMetadata]:
    return metadata.state_dict_metadata[key].chunks


def one_row_short(metadata: Metadata, key: str) -> None:
    chunk = chunks_of(metadata, key)[1]
    chunks_of(metadata, key)[1] = dataclasses.replace(chunk, sizes=torch.Size((chunk.sizes[0] - 1, *chunk.sizes[1:])))


def twice(metadata: Metadata, key: str) -> None:
    first = chunks_of(metadata, key)[0]
    chunks_of(metadata, key)[:] = [first, first]


def moved(metadata: Metadata, key: str) -> None:
    chunk = chunks_of(metadata, key)[1]
    chunks_of(metadata, key)[1] = dataclasses.replace(chunk, offsets=torch.Size((chunk.offsets[0] + 1, *chunk.offsets[1:])))


def flat(metadata: Metadata, key: str) -> None:
    chunks_of(metadata, key)[0] = ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))


def change_info(metadata: Metadata, key: str, **fields: Any) -> None:
    vars(next(info for index, info in metadata.storage_data.items() if index.fqn == key)).update(fields)


def without_a_file(metadata: Metadata, key: str) -> None:
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != key}


def value_and_dict(metadata: Metadata, key: str) -> None:
    metadata.planner_data[key] = metadata.planner_data[WEIGHT][:1]


DAMAGE: dict[str, tuple[Callable[[Metadata, str], Any], str]] = {
    "no chunks": (lambda metadata, key: chunks_of(metadata, key).clear(), "0 of"),
    "one chunk is gone": (lambda metadata, key: chunks_of(metadata, key).pop(), "elements are there"),
    "one row short": (one_row_short, "elements are there"),
    "one chunk twice, another missing": (twice, "overlap"),
    "a chunk reaches beyond": (moved, "is beyond"),
    "a chunk of other dims": (flat, "a chunk of shape"),
    "no file": (without_a_file, "no file for"),
    "in the folder above": (lambda metadata, key: change_info(metadata, key, relative_path="../a.distcp"), r"\.\./a\.distcp"),
    "an absolute path": (lambda metadata, key: change_info(metadata, key, relative_path="/a.distcp"), "/a.distcp"),
    "before the file": (lambda metadata, key: change_info(metadata, key, offset=-8), "at byte -8"),
    "a number that is text": (lambda metadata, key: change_info(metadata, key, length="8"), "'8' long"),
    "a value and a dict": (value_and_dict, "as a value and as a dict|of keys and numbers"),
    "no place": (lambda metadata, key: metadata.planner_data.update({key: None}), "at None"),
    "chunks that are none": (lambda metadata, key: setattr(metadata.state_dict_metadata[key], "chunks", [3]), "cannot be read"),
}
SLOW = {"one chunk is gone", "an absolute path", "no file", "no place", "a chunk of other dims"}
CASES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in DAMAGE]


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("key", [WEIGHT, MOMENT])
@pytest.mark.parametrize("damage", CASES)
def test_metadata_that_do_not_cover_a_tensor_are_refused_by_every_reader(tmp_path: Path, key: str, damage: str) -> None:
    model = fully_shard(mlp(), mesh=cpu_mesh())
    optimizer = adamw(model.parameters())
    fed_own_chunk(model, batches(1), optimizer=optimizer)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
        path = checkpointer.latest()
        assert path is not None
        change, text = DAMAGE[damage]
        if dist.get_rank() == 0:
            metadata = pickle.loads((path / ".metadata").read_bytes())
            change(metadata, key)
            (path / ".metadata").write_bytes(pickle.dumps(metadata))
        dist.barrier()
        calls = (checkpointer.load, lambda: load_checkpoint(model, path), lambda: open_source(path))
        for call in calls:
            with pytest.raises(CheckpointError, match=text) as caught:
                call()
            assert caught.value.file == str(path / ".metadata")


def test_boxes_that_cover_a_shape() -> None:
    def box(start: tuple[int, ...], stop: tuple[int, ...]) -> Box:
        return Box(start, stop)

    assert cover_problem((), [box((), ())]) is None
    assert cover_problem((0, 3), []) is None
    assert cover_problem((4, 2), [box((0, 0), (2, 2)), box((2, 0), (4, 1)), box((2, 1), (4, 2)), box((4, 0), (4, 2))]) is None
    assert cover_problem((), []) == "0 of 1 elements are there"
    assert "overlap" in (cover_problem((), [box((), ())] * 2) or "")
    assert "overlap" in (cover_problem((4, 2), [box((0, 0), (3, 1)), box((2, 0), (4, 1)), box((1, 1), (4, 2))]) or "")
    assert "beyond" in (cover_problem((4,), [box((0,), (3,)), box((4,), (5,))]) or "")
    crossed = [box((0, 0), (3, 1)), box((2, 0), (4, 1)), box((0, 1), (3, 2))]
    assert "overlap" in (cover_problem((4, 2), crossed) or "")  # as many elements as there are
    columns = [box((0, each), (8, each + 1)) for each in range(2000)]
    assert cover_problem((8, 2000), columns) is None
    assert cover_problem((8, 2000), columns[1:]) == "15992 of 16000 elements are there"


def test_latest_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "run" / "step_000001"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".metadata").touch()
    for named in ("..", "../run", str(tmp_path), "."):
        (tmp_path / "run" / "latest").write_text(named)
        assert CheckpointFolder(tmp_path / "run", None).latest() == tmp_path / "run" / "step_000001"


# --- DeepSpeed and others ---------------------------------------------------------------------------------------------------------


def deepspeed(folder: Path, changes: dict[str, Any]) -> Path:
    """A ZeRO-3 checkpoint of one rank, with other values at some places."""
    folder.mkdir(exist_ok=True)
    optim = {
        "zero_stage": 3,
        "partition_count": 1,
        "fp32_flat_groups": [torch.arange(4.0)],
        "optimizer_state_dict": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    states = {"module": {}, "param_shapes": [{"a": torch.Size((2, 2))}], "buffer_names": []}
    optim = {key: value for key, value in (optim | changes).items() if value is not KeyError and key not in states}
    states = {key: changes.get(key, value) for key, value in states.items() if changes.get(key) is not KeyError}
    torch.save({"optimizer_state_dict": optim}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save(states, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": None},
        {"partition_count": [None]},
        {"partition_count": []},
        {"fp32_flat_groups": None},
        {"fp32_flat_groups": [3]},
        {"fp32_flat_groups": [torch.tensor(1.0)]},
        {"optimizer_state_dict": {"state": {0: 3}, "param_groups": [{"params": [0]}]}},
        {"optimizer_state_dict": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{}]}},
        {"optimizer_state_dict": {"state": [], "param_groups": None}},
        {"param_shapes": None},
        {"param_shapes": [3]},
        {"param_shapes": [{"a": "no shape"}]},
        {"param_shapes": [{3: (4,)}]},
        {"buffer_names": 3},
        {"frozen_param_shapes": {"b": (2,)}},
        {"shared_params": [3]},
    ],
    ids=str,
)
def test_malformed_files_of_deepspeed_are_checkpoint_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert open_source(deepspeed(tmp_path / "good", {})).model["a"].shape == (2, 2)
    folder = deepspeed(tmp_path / "bad", changes)
    if "shared_params" in changes or "frozen_param_shapes" in changes:
        states = torch.load(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt") | changes
        torch.save(states, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError) as caught:
        convert(folder, tmp_path / "out", to="torch")
    assert str(folder) in str(caught.value) or caught.value.key is not None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bad", "good"]


def test_a_tag_of_deepspeed_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    deepspeed(tmp_path, {})
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "latest").write_text("..")
    with pytest.raises(CheckpointError, match="is not a checkpoint of a known format"):
        open_source(tmp_path / "inner")


@on_ranks(2)
def test_a_folder_of_a_later_torch_whose_properties_of_tensors_have_more_fields_is_read(tmp_path: Path) -> None:
    """Symptom: under torch 2.13 "too many values to unpack" for every folder that torch 2.15 wrote, which adds strides."""
    model = fully_shard(mlp(), mesh=cpu_mesh())
    expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
    known = TensorProperties.__getstate__

    def with_more(properties: TensorProperties) -> tuple[Any, ...]:
        return (*known(properties)[:5], None, "a field of the future")

    with Checkpointer(tmp_path, model, asynchronous=False) as checkpointer:
        checkpointer.save(1)
        metadata = tmp_path / "step_000001" / ".metadata"
        if dist.get_rank() == 0:
            saved = pickle.loads(metadata.read_bytes())
            with patch.object(TensorProperties, "__getstate__", with_more):
                metadata.write_bytes(pickle.dumps(saved))
        for param in model.parameters():
            param.data.zero_()
        assert checkpointer.load().step == 1
        assert_same_tensors({name: value.full_tensor() for name, value in model.state_dict().items()}, expected, "value")
