"""DeepSpeed's ZeRO checkpoints are read without DeepSpeed: files of its documented layout, written here by hand from whole tensors."""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2.checkpoint import CheckpointError, convert, open_source
from harness.models import transformer

GROUPS = [["embedding.weight", "position", "blocks.0.mlp.up.weight"], ["norm.weight", "norm.bias", "blocks.1.mlp.scale"]]


@pytest.fixture
def foreign() -> Iterator[types.ModuleType]:
    """Classes of a package that is there when a file is written, and gone when it is read."""
    module = types.ModuleType("deepspeed_like")
    for name in ("ZeroStage", "LossScaler"):
        setattr(module, name, type(name, (), {"__module__": "deepspeed_like", "__init__": lambda self: None}))
    sys.modules["deepspeed_like"] = module
    yield module
    sys.modules.pop("deepspeed_like", None)


def values(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    state = transformer().state_dict()
    return {name: torch.randn_like(state[name]) for group in GROUPS for name in group}


def zero3(folder: Path, foreign: types.ModuleType, world_size: int, sub_groups: list[list[str]]) -> dict[str, dict[str, Tensor]]:
    """Every parameter cut evenly over the ranks, each of ``sub_groups`` a flat buffer; a frozen, a tied and a buffer beside."""
    state = {key: values(seed) for seed, key in enumerate(("param", "exp_avg", "exp_avg_sq"))}
    frozen = torch.arange(7.0)
    folder.mkdir()
    (folder.parent / "latest").write_text(folder.name)

    def part(tensor: Tensor, rank: int) -> Tensor:
        each = -(-tensor.numel() // world_size)
        return torch.cat([tensor.flatten(), torch.full((each * world_size - tensor.numel(),), 99.0)])[rank * each : (rank + 1) * each]

    for rank in range(world_size):
        flat = {key: [torch.cat([part(state[key][name], rank) for name in names]) for names in sub_groups] for key in state}
        optimizer = {
            "state": {
                index: {"step": torch.tensor(3.0), "exp_avg": flat["exp_avg"][index], "exp_avg_sq": flat["exp_avg_sq"][index]}
                for index in range(len(sub_groups))
            },
            "param_groups": [{"lr": 0.5, "params": [0, 1]}, {"lr": 0.25, "params": [2]}],
        }
        zero = {
            "zero_stage": 3,
            "loss_scaler": foreign.LossScaler(),
            "partition_count": world_size,
            "optimizer_state_dict": optimizer,
            "fp32_flat_groups": flat["param"],
        }
        torch.save({"optimizer_state_dict": zero, "ds_config": {}}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        empty = {name: torch.empty(0) for names in GROUPS for name in names}
        model = {
            "module": OrderedDict([*empty.items(), ("frozen", torch.empty(0)), ("count", torch.tensor(5)), ("tied", torch.empty(0))]),
            "buffer_names": ["count"],
            "param_shapes": [OrderedDict((name, state["param"][name].shape) for name in names) for names in sub_groups],
            "frozen_param_shapes": OrderedDict(frozen=frozen.shape),
            "frozen_param_fragments": OrderedDict(frozen=part(frozen, rank)),
            "shared_params": {"tied": "embedding.weight"},
            "args": argparse.Namespace(seed=1),
            "ds_version": "0.19.8",
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    state["param"] |= {"frozen": frozen, "count": torch.tensor(5), "tied": state["param"]["embedding.weight"]}
    return state


SUB_GROUPS = [GROUPS[0][:2], GROUPS[0][2:], GROUPS[1]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_zero_3_is_whole_tensors_by_name(tmp_path: Path, foreign: types.ModuleType, world_size: int) -> None:
    expected = zero3(tmp_path / "global_step3", foreign, world_size, SUB_GROUPS)
    del sys.modules["deepspeed_like"]
    done = convert(tmp_path, tmp_path.parent / f"{tmp_path.name}.pt", to="torch")
    assert done.source == "deepspeed"
    result = torch.load(done.path, weights_only=True)
    assert list(result["model"]) == [*GROUPS[0], *GROUPS[1], "frozen", "count", "tied"]
    for name, value in expected["param"].items():
        assert torch.equal(result["model"][name], value), name
    assert result["model"]["tied"].data_ptr() == result["model"]["embedding.weight"].data_ptr()
    optimizer = result["optimizer"]
    assert [(group["lr"], group["params"]) for group in optimizer["param_groups"]] == [(0.5, GROUPS[0]), (0.25, GROUPS[1])]
    for name, state in optimizer["state"].items():
        assert state["step"] == 3
        assert torch.equal(state["exp_avg"], expected["exp_avg"][name])
        assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"][name])


def zero2(folder: Path, world_size: int, paddings: list[list[int]] | None) -> dict[str, dict[str, Tensor]]:
    """Each group's parameters one after another, padded to a multiple of twice the ranks, cut evenly; padding is not saved."""
    state = {key: values(seed) for seed, key in enumerate(("param", "exp_avg"))}
    folder.mkdir()

    def flat(key: str, index: int, rank: int, padded: bool) -> Tensor:
        pads = paddings[index] if paddings else [0] * len(GROUPS[index])
        line = torch.cat([F.pad(state[key][name].flatten(), (0, pad)) for name, pad in zip(GROUPS[index], pads, strict=True)])
        each = -(-line.numel() // (2 * world_size)) * 2
        whole = torch.cat([line, torch.zeros(each * world_size - line.numel())]) if padded else line
        return whole[rank * each : (rank + 1) * each].clone()

    for rank in range(world_size):
        zero: dict[str, Any] = {
            "zero_stage": 2,
            "partition_count": [world_size, world_size],
            "single_partition_of_fp32_groups": [flat("param", index, rank, False) for index in range(2)],
            "param_alignment_paddings": paddings,
            "base_optimizer_state": {
                "state": {index: {"exp_avg": flat("exp_avg", index, rank, True)} for index in range(2)},
                "param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1]}],
            },
        }
        torch.save({"optimizer_state_dict": zero}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    shapes = [OrderedDict((name, state["param"][name].shape) for name in names) for names in GROUPS]
    module = OrderedDict((name, state["param"][name].bfloat16()) for names in GROUPS for name in names)
    torch.save({"module": module, "buffer_names": [], "param_shapes": shapes}, folder / "mp_rank_00_model_states.pt")
    return state


@pytest.mark.parametrize("paddings", [None, [[2, 0, 4], [0, 1, 0]]])
@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_2_is_whole_tensors_by_name(tmp_path: Path, world_size: int, paddings: list[list[int]] | None) -> None:
    expected = zero2(tmp_path / "zero", world_size, paddings)
    convert(tmp_path / "zero", tmp_path / "out.pt", to="torch")
    result = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, value in expected["param"].items():
        assert torch.equal(result["model"][name], value), name
        assert torch.equal(result["optimizer"]["state"][name]["exp_avg"], expected["exp_avg"][name])


def test_missing_ranks_and_other_saves_are_errors_that_name_them(tmp_path: Path, foreign: types.ModuleType) -> None:
    folder = tmp_path / "step"
    zero3(folder, foreign, 3, SUB_GROUPS)
    optim = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = optim.read_bytes()
    optim.unlink()
    with pytest.raises(CheckpointError, match=r"optim states of ranks \[1\]"):
        open_source(folder)
    optim.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"pp_rank_1_mp_rank_00_optim_states\.pt cannot be read"):
        open_source(folder)
    optim.write_bytes(data)
    last = folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    last.unlink()
    with pytest.raises(CheckpointError, match=r"one of each of 3 ranks"):
        open_source(folder)
    zero3(tmp_path / "other", foreign, 3, [GROUPS[0][:2], GROUPS[0][2:], GROUPS[1][:2]])
    last.write_bytes((tmp_path / "other" / last.name).read_bytes())
    with pytest.raises(CheckpointError, match=r"rank_2.* has \d+ elements of parameters"):
        open_source(folder)
    for path in folder.glob("*optim*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"optim states of ranks \[0\]"):
        open_source(folder)


@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("copied", [False, True])
def test_files_of_two_ranks_that_are_exchanged_or_copied_are_refused(
    tmp_path: Path, foreign: types.ModuleType, kind: str, copied: bool
) -> None:
    zero3(tmp_path / "step", foreign, 2, SUB_GROUPS)
    first, second = sorted((tmp_path / "step").glob(f"*_{kind}_states.pt"))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[1] if copied else data[0])
    with pytest.raises(CheckpointError, match=r"was saved as .*_rank_[01]_mp"):
        open_source(tmp_path)


@pytest.mark.parametrize("copied", [False, True])
def test_files_of_zero_2_without_names_are_compared_with_the_weights_of_the_model(tmp_path: Path, copied: bool) -> None:
    """Files that were saved through a file object do not have their names in them."""
    folder = tmp_path / "zero"
    expected = zero2(folder, 4, None)
    names = sorted(folder.glob("*_optim_states.pt"))
    for path in names:
        state = torch.load(path)
        with path.open("wb") as file:
            torch.save(state, file)
    assert open_source(folder).model.keys() == expected["param"].keys()
    data = names[0].read_bytes(), names[1].read_bytes()
    names[0].write_bytes(data[1])
    names[1].write_bytes(data[1] if copied else data[0])
    with pytest.raises(CheckpointError, match=r"pp_rank_0_mp_rank_00_optim_states\.pt has other values of \S+ than the model states"):
        open_source(folder)
