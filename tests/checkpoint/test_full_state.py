"""The full state on rank 0 is what the unsharded model and its optimizer would have given."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard

import fsdp2.checkpoint.full_state as full_state
from fsdp2 import fully_shard
from fsdp2.checkpoint import CheckpointError, full_optimizer_state_dict, full_state_dict, save_full_state
from harness import cpu_mesh, on_ranks
from harness.checkpoints import trained
from harness.memory import PeakBytes, covered_bytes
from harness.models import MLP, batches, mlp, token_batches, transformer
from harness.sharding import shard_blocks
from harness.training import adamw, assert_equal_training, fed_own_chunk, fed_whole, sgd

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def assert_same_state(actual: Any, expected: Any, where: str = "state") -> None:
    """Equal bit for bit, in structure, types, and order of keys; plain tensors on the CPU, each with no bytes but its own."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same_state(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same_state(*pair, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        assert type(actual) is Tensor, where
        assert torch.equal(actual, expected), where
        assert actual.dtype == expected.dtype
        assert not actual.requires_grad
        assert actual.untyped_storage().nbytes() == actual.numel() * actual.itemsize, where
    else:
        assert actual == expected, where


# --- the model --------------------------------------------------------------------------------------------------------------------


def unsharded_after_a_forward(model: nn.Module) -> nn.Module:
    shard_blocks(model)(batches(1)[0])  # the root stays unsharded
    return model


HOW = {
    "rows": lambda model: shard_blocks(model),
    "columns": lambda model: shard_blocks(model, shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None),
    "unsharded": unsharded_after_a_forward,
}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", HOW)
def test_model_state_is_the_unsharded_one_on_rank_0_and_empty_elsewhere(how: str) -> None:
    full = full_state_dict(HOW[how](mlp()))
    assert_same_state(full, dict(mlp().state_dict()) if dist.get_rank() == 0 else {})


@on_ranks(4)
def test_model_state_is_gathered_from_hsdp() -> None:
    full = full_state_dict(shard_blocks(mlp(), mesh=cpu_mesh(2, 2)))
    assert_same_state(full, dict(mlp().state_dict()) if dist.get_rank() == 0 else {})


@on_ranks(2)
def test_tied_parameters_are_one_tensor_under_both_names() -> None:
    full = full_state_dict(shard_blocks(transformer(tied=True)))
    if dist.get_rank() == 0:
        assert full["embedding.weight"] is full["head.weight"]
        transformer(tied=True, seed=1).load_state_dict(full)


class WithExtras(nn.Module):
    """Buffers, tied ones as well, extra state, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.BatchNorm1d(3)])
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("same_mask", self.mask)
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.count = 7

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@on_ranks(2)
def test_buffers_frozen_parameters_and_extra_state_are_included() -> None:
    reference = WithExtras()
    model = shard_blocks(WithExtras())
    full = full_state_dict(model)
    if dist.get_rank() == 0:
        assert_same_state(full, dict(reference.state_dict()))
        assert full["mask"] is full["same_mask"]
        full["mask"].zero_()
        assert model.mask.sum() == 2, "the copy shares nothing with the model"


@on_ranks(2)
def test_values_on_the_meta_device_are_an_error_that_names_them() -> None:
    with torch.device("meta"):
        model = MLP()
    with pytest.raises(RuntimeError, match=r"first\.weight \(10, 7\)"):
        full_state_dict(shard_blocks(model))


# --- the optimizer ----------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_optimizer_state_is_what_torch_gathers(make_optimizer: Any) -> None:
    model = shard_blocks(mlp())
    optimizer = trained(model, make_optimizer)
    full = full_optimizer_state_dict(model, optimizer, by_name=True)
    expected = get_optimizer_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        assert full.keys() == expected.keys()
        assert full["param_groups"] == expected["param_groups"]
        assert full["state"].keys() == expected["state"].keys()
        for name in full["state"]:
            assert_same_state(full["state"][name], expected["state"][name])
    else:
        assert full == {}


@on_ranks(2)
def test_optimizer_state_before_the_first_step_is_empty_and_takes_none() -> None:
    """torch's own ``get_optimizer_state_dict`` steps with zero gradients here, so that Adam is one step ahead ever after."""
    model = shard_blocks(mlp())
    optimizer = adamw(model.parameters())
    full = full_optimizer_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        assert_same_state(full, adamw(mlp().parameters()).state_dict())
    assert not optimizer.state


@on_ranks(2)
def test_optimizer_state_of_some_parameters_in_several_groups_is_the_unsharded_one() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        model.first.weight.requires_grad_(False)
        return [
            {"params": [model.last.bias], "lr": 0.5},
            {"params": list(model.blocks.parameters())},
            {"params": [model.first.weight, model.first.bias], "weight_decay": torch.tensor(0.25)},
        ]

    reference, model = mlp(), shard_blocks(mlp())
    whole, optimizer = adamw(groups(reference)), adamw(groups(model))
    for each, chosen in ((reference, whole), (model, optimizer)):
        each(batches(1)[0]).sum().backward()
        chosen.step()
    full = full_optimizer_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        expected = whole.state_dict()
        torch.testing.assert_close(full["state"], expected["state"])
        assert_same_state(full["param_groups"], expected["param_groups"])


@on_ranks(2)
def test_optimizer_over_other_parameters_is_an_error_that_names_their_places() -> None:
    model = mlp()
    optimizer = adamw(model.parameters())
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\['params'\]\[0\]: Parameter \(10, 7\)"):
        full_optimizer_state_dict(shard_blocks(model), optimizer)


# --- memory -----------------------------------------------------------------------------------------------------------------------


class Memory(PeakBytes):
    """Collectives leave storages behind whose Python object is alive and whose bytes are gone."""

    def now(self) -> list[tuple[int, int]]:
        alive = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        pieces = []
        for storage in alive:
            with contextlib.suppress(RuntimeError):
                pieces.append((storage.data_ptr(), storage.nbytes()))
        return [piece for piece in pieces if piece[1]]


@on_ranks(2, 4)
@pytest.mark.parametrize("uneven", [0, 1])
def test_memory_is_the_result_and_two_bands(uneven: int) -> None:
    """Result on rank 0 alone."""
    layers = [nn.Linear(128 + uneven, 128 + uneven, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers)
    whole = layers[0].weight.numel() * 4
    band = 10_000
    for layer in layers:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
    model(torch.randn(2, 128 + uneven)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for take, tensors in ((lambda: full_state_dict(model), 8), (lambda: full_optimizer_state_dict(model, optimizer), 16)):
        with patch.object(full_state, "BAND_NBYTES", band), Memory() as memory:
            memory.touch([param.to_local() for param in model.parameters()])
            memory.touch([value for state in optimizer.state.values() for value in state.values()])
            before = covered_bytes(memory.now())
            memory.reset()
            result = take()
            kept = covered_bytes(memory.now()) - before
        small = 8 * 200  # rounding of padding, and Adam's step counts
        result_nbytes = tensors * whole + small if dist.get_rank() == 0 else 0
        assert kept <= result_nbytes + small
        assert memory.peak - before <= result_nbytes + 2 * band + small
        assert bool(result) is (dist.get_rank() == 0)


# --- the file ---------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_file_loads_into_the_unsharded_model_and_its_optimizer(tmp_path: Path) -> None:
    model = shard_blocks(transformer(tied=True))
    optimizer = trained(model, sgd, inputs=token_batches(2))
    save_full_state(tmp_path / "deep" / "full.pt", model, optimizer)
    save_full_state(tmp_path / "model.pt", model)
    expected = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    step = fed_own_chunk(model, token_batches(1, seed=5), optimizer=optimizer)[0]
    whole_step = {name: value.full_tensor() for name, value in step.params.items()}

    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "full.pt", "model.pt"]
    assert_same_state(torch.load(tmp_path / "model.pt", weights_only=True), dict(expected))
    loaded = torch.load(tmp_path / "deep" / "full.pt", weights_only=True)
    unsharded = transformer(tied=True, seed=9)
    unsharded.load_state_dict(loaded["model"])
    restored = sgd(unsharded.parameters())
    restored.load_state_dict(loaded["optimizer"])
    unsharded(token_batches(1, seed=5)[0]).square().mean().backward()
    restored.step()
    for name, value in unsharded.named_parameters():
        torch.testing.assert_close(value.detach(), whole_step[name], atol=1e-6, rtol=1e-5)


@on_ranks(2)
def test_optimizer_state_by_name_goes_into_a_model_of_any_sharding() -> None:
    model = shard_blocks(mlp())
    optimizer = trained(model)
    full = full_optimizer_state_dict(model, optimizer, by_name=True)
    other = fully_shard(mlp(), mesh=cpu_mesh())
    loaded = adamw(other.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, loaded, full, options=options)
    again = full_optimizer_state_dict(other, loaded, by_name=True)
    assert_same_state(again["state"] if again else {}, full["state"] if full else {})


@on_ranks(2)
def test_parameters_that_share_a_step_count_in_a_file_of_fsdp1_count_by_themselves_again() -> None:
    whole = mlp()
    whole_optimizer = adamw(whole.parameters())
    fed_whole(whole, batches(2), lambda _: whole_optimizer)
    names = [name for name, _ in whole.named_parameters()]
    plain = whole_optimizer.state_dict()
    step = torch.tensor(2.0)  # FSDP1 keeps one for all parameters of a flat parameter
    state = {names[index]: {**value, "step": step} for index, value in plain["state"].items()}
    saved = {"state": state, "param_groups": [{**plain["param_groups"][0], "params": names}]}

    model = mlp()
    model.load_state_dict(whole.state_dict())
    optimizer = adamw(shard_blocks(model).parameters())
    set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(full_state_dict=True))
    expected = fed_whole(whole, batches(3, seed=5), lambda _: whole_optimizer)
    assert_equal_training(fed_own_chunk(model, batches(3, seed=5), optimizer=optimizer), expected)

    rolled_back = optimizer.state_dict()  # into an optimizer that has stepped, and into a new one
    for value in rolled_back["state"].values():
        value["step"] = rolled_back["state"][0]["step"]
    for each in (optimizer, adamw(model.parameters())):
        each.load_state_dict(copy.deepcopy(rolled_back))
        model(batches(1)[0]).sum().backward()
        each.step()
        each.zero_grad()
        assert {value["step"].item() for value in each.state.values()} == {6.0}


@on_ranks(2)
def test_full_disk_raises_on_every_rank_and_leaves_the_earlier_file(tmp_path: Path) -> None:
    path, model = tmp_path / "model.pt", shard_blocks(mlp())
    save_full_state(path, model)
    before = path.read_bytes()
    error = OSError(28, "No space left on device")
    with patch("os.fsync", side_effect=error), pytest.raises(CheckpointError, match=r"model.pt: OSError.*No space left"):
        save_full_state(path, model)
    assert path.read_bytes() == before
    dist.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]
