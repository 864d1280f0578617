"""Checkpoints taken for what they are not: steps for ranks, quantized weights for weights, one optimizer's state for another's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointError, convert, load_checkpoint, load_safetensors, open_source
from harness import cpu_mesh, on_ranks
from harness.models import batches, mlp
from harness.training import fed_own_chunk


@pytest.mark.parametrize("around", [False, True])
def test_files_of_several_steps_are_not_taken_for_those_of_ranks(tmp_path: Path, around: bool) -> None:
    """The first of them won."""
    for step in range(3):
        state = mlp(seed=step).state_dict()
        torch.save({"model": state, "step": step} if around else state, tmp_path / f"ckpt_{step}.pt")
    text = r"ckpt_1\.pt and ckpt_0\.pt are each a whole state, and differ in \d+ tensors"
    for call in (lambda: open_source(tmp_path), lambda: load_checkpoint(mlp(), tmp_path)):
        with pytest.raises(CheckpointError, match=text) as caught:
            call()
        assert caught.value.file == str(tmp_path / "ckpt_1.pt")
    model = mlp(seed=9)
    load_checkpoint(model, tmp_path / "ckpt_2.pt")
    assert torch.equal(model.last.weight, mlp(seed=2).last.weight)


def test_copies_that_every_rank_has_saved_are_one_state(tmp_path: Path) -> None:
    for rank in range(2):
        state = mlp(seed=3).state_dict() | {"seen": torch.tensor([rank])}  # a number that differs between ranks
        torch.save(state, tmp_path / f"model_rank{rank}.pt")
    model = mlp(seed=9)
    load_checkpoint(model, tmp_path, strict=False)
    assert torch.equal(model.last.weight, mlp(seed=3).last.weight)


SCALES = ["weight_scale_inv", "weight_scale", "weight._scale", "scale_weight", "scale", "weight_scale_2", "scale_inv", "w_Scale"]
SCALES += ["amax", "absmax", "weight_amax", "weight.absmax", "input_amax", "weight_inv", "weight_d", "weight.d"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (6,), (6, 1), (1, 4), (4,), (3, 2), (2, 1), (1, 1)]


@pytest.mark.parametrize("scale", SCALES)
def test_float8_weights_are_not_loaded_without_their_scales(tmp_path: Path, scale: str) -> None:
    """With ``strict=False`` the scale was unexpected, and the values were converted as they were."""
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    save_file({"0.weight": weight, "0.bias": torch.ones(4), f"0.{scale}": torch.tensor([0.5])}, tmp_path / "a.safetensors")
    model = nn.Sequential(nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    ignore = [(rf"0\.{scale}", None)]
    for options in ({"strict": False}, {"key_map": ignore}):
        with pytest.raises(CheckpointError, match=rf"0\.weight: .*F8_E4M3 .* to be scaled by 0\.{scale}") as caught:
            load_safetensors(model, tmp_path, **options)
        assert caught.value.report.mismatched[0].scale == f"0.{scale}"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = load_safetensors(model, tmp_path, strict=False, ignore_mismatched=True)
    assert report.loaded == ["0.bias"]
    assert torch.equal(model[0].weight, before["0.weight"])
    with pytest.raises(CheckpointError, match=rf"0\.weight: is scaled by 0\.{scale}"):
        convert(tmp_path / "a.safetensors", tmp_path / "out", to="torch", dtype=torch.bfloat16)
    convert(tmp_path / "a.safetensors", tmp_path / "out", to="torch")  # as they are


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["d", "factor", "weight_d", "absmax"])
def test_a_tensor_next_to_a_float8_weight_that_the_model_has_no_place_for_may_be_its_scale(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """Scales of one number, of rows, of columns and of blocks. By ``strict=False`` they were dropped."""
    weight = torch.randn(6, 4).to(torch.float8_e4m3fn)
    save_file({"0.weight": weight, f"0.{name}": torch.full(shape, 0.5), "0.bias": torch.ones(6)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"to be scaled by 0\.{name}"):
        load_safetensors(nn.Sequential(nn.Linear(4, 6)), tmp_path, strict=False)


class Gained(nn.Linear):
    """As layers with a factor of their own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain, self.weight_gate = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("rename", [False, True])
def test_plain_models_whose_weights_alone_are_float8_are_loaded(tmp_path: Path, rename: bool) -> None:
    """Biases, norms and factors keep their dtype. What the model has a place for, maybe by another name, is no scale."""
    reference = nn.Sequential(Gained(), nn.LayerNorm(4), nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    state = {
        name: value.to(torch.float8_e4m3fn if value.dim() == 2 else torch.bfloat16) for name, value in reference.state_dict().items()
    }
    names = {name: f"old.{name}" if rename else name for name in state}
    extra = {"old.3.steps" if rename else "3.steps": torch.ones(3), "1.more": torch.ones(4)}  # of no scale's shape; of no float8 tensor
    save_file({names[name]: value for name, value in state.items()} | extra, tmp_path / "model.safetensors")
    model = nn.Sequential(Gained(), nn.LayerNorm(4), nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    report = load_safetensors(model, tmp_path, strict=False, key_map=[(r"old\.", "")])
    assert set(report.unexpected) == {"3.steps", "1.more"}
    assert all(torch.equal(value, state[name].to(value.dtype)) for name, value in model.state_dict().items())
    plain = {name: value for name, value in state.items() if name != "0.weight_gate"}  # without a model it may be a scale
    save_file(plain, tmp_path / "plain.safetensors")
    convert(tmp_path / "plain.safetensors", tmp_path / "out", to="torch", dtype=torch.bfloat16)


def test_float8_weights_are_loaded_where_nothing_is_lost(tmp_path: Path) -> None:
    """Into a float8 parameter, with its scale beside it; and converted, if they have none."""
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    model = nn.Module()
    model.register_buffer("weight", torch.zeros(4, 4, dtype=torch.float8_e4m3fn))
    model.register_buffer("weight_scale", torch.zeros(1))
    save_file({"weight": weight, "weight_scale": torch.tensor([0.5])}, tmp_path / "model.safetensors")
    load_safetensors(model, tmp_path)
    assert torch.equal(model.weight.view(torch.uint8), weight.view(torch.uint8))
    (tmp_path / "plain").mkdir()
    save_file({"weight": weight}, tmp_path / "plain" / "model.safetensors")
    plain = nn.Linear(4, 4, bias=False)
    load_safetensors(plain, tmp_path / "plain")
    assert torch.equal(plain.weight, weight.float())


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


@on_ranks(2, timeout=60)
@pytest.mark.parametrize(
    ("theirs", "ours", "lost"), [("AdamW", "SGD", "momentum"), ("SGD", "AdamW", "betas"), ("AdamW", "RMSprop", "alpha")]
)
def test_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path, theirs: str, ours: str, lost: str) -> None:
    """It was loaded, and the next step failed."""
    model = fully_shard(mlp(), mesh=cpu_mesh())
    optimizer = OPTIMIZERS[theirs](model.parameters())
    fed_own_chunk(model, batches(1), optimizer=optimizer)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
    other = fully_shard(mlp(seed=1), mesh=cpu_mesh())
    optimizer = OPTIMIZERS[ours](other.parameters())
    groups = copy.deepcopy([{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups])
    text = rf"lacks options of {ours}\n.*no .*{lost}"
    with Checkpointer(tmp_path, other, optimizer) as checkpointer, pytest.raises(CheckpointError, match=text):
        checkpointer.load()
    assert [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups] == groups
    fed_own_chunk(other, batches(1), optimizer=optimizer)


@on_ranks(2, timeout=60)
def test_state_that_an_older_or_newer_torch_has_saved_is_taken(tmp_path: Path) -> None:
    """Options that an optimizer has got since, and gives itself, or that are nobody's."""
    model = fully_shard(mlp(), mesh=cpu_mesh())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    fed_own_chunk(model, batches(1), optimizer=optimizer)
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    optimizer.param_groups[0]["of_a_later_torch"] = 1
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        restored = OPTIMIZERS["AdamW"](model.parameters())
    with Checkpointer(tmp_path, model, restored) as checkpointer:
        assert checkpointer.load().step == 1
