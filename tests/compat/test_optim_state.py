"""Optimizer state in FSDP1's format: saved, loaded, exchanged with torch's FSDP1, with unsharded optimizers, and between strategies."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from fsdp2.compat import (
    CPUOffload,
    FullOptimStateDictConfig,
    ModuleWrapPolicy,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp2.compat import FullyShardedDataParallel as FSDP
from fsdp2.errors import CheckpointError
from harness import device_type, on_ranks
from harness.models import Block, batches, mlp
from harness.training import forward_backward, own_chunk

BLOCKS = ModuleWrapPolicy({Block})
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
NAMES = [name for name, _ in mlp().named_parameters()]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's."""
    blocks = list(model.blocks.parameters())
    inside = {id(param) for param in blocks}
    return [
        {"params": blocks, "lr": 0.02},
        {"params": [param for param in reversed(list(model.parameters())) if id(param) not in inside], "weight_decay": 0.2},
    ]


def adam(model: nn.Module) -> Optimizer:
    return AdamW(groups(model), lr=0.01)


def trained_reference(num_steps: int = 2) -> tuple[nn.Module, Optimizer]:
    model = mlp()
    optimizer = adam(model)
    for x in batches(num_steps):
        forward_backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def trained(num_steps: int = 2, **arguments: Any) -> tuple[Any, Optimizer]:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS, **arguments)
    optimizer = adam(model)
    for x in batches(num_steps):
        forward_backward(model, own_chunk(x))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def expected_by_name() -> dict[str, Any]:
    """The unsharded optimizer's state, with names for numbers."""
    model, optimizer = trained_reference()
    names = {id(param): name for name, param in model.named_parameters()}
    raw = optimizer.state_dict()
    by_group = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    flat = [name for group in by_group for name in group]
    return {
        "state": {flat[number]: value for number, value in raw["state"].items()},
        "param_groups": [group | {"params": own} for group, own in zip(raw["param_groups"], by_group, strict=True)],
    }


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        for what, value in values.items():
            mine = found["state"][name][what]
            assert type(mine) is Tensor
            torch.testing.assert_close(mine.cpu(), value, rtol=1e-4, atol=1e-6, msg=f"{name} {what}")
    assert found["param_groups"] == expected["param_groups"]


def assert_steps_alike(model: nn.Module, optimizer: Optimizer, reference: nn.Module, its_optimizer: Optimizer) -> None:
    x = batches(1, seed=7)[0]
    forward_backward(model, own_chunk(x))
    forward_backward(reference, x)
    optimizer.step()
    its_optimizer.step()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor().cpu(), param.detach(), rtol=1e-4, atol=1e-5, msg=name)


# --- saving -------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("offload", [False, True])
def test_whole_state_is_that_of_the_unsharded_optimizer_by_name(strategy: str, offload: bool) -> None:
    model, optimizer = trained(sharding_strategy=ShardingStrategy[strategy], cpu_offload=CPUOffload(offload_params=offload))
    assert_same_state(FSDP.optim_state_dict(model, optimizer), expected_by_name())
    raw = optimizer.state_dict()
    assert_same_state(FSDP.optim_state_dict(model, optimizer, raw), expected_by_name())
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, FULL, None, config):
        state = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        assert_same_state(state, expected_by_name())
    else:
        assert state == {}
    for rank0_only in (True, False):
        state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0_only)
        assert bool(state) is (dist.get_rank() == 0 or not rank0_only)


@on_ranks(2)
def test_sharded_state_is_dtensors_by_name() -> None:
    model, optimizer = trained()
    with FSDP.state_dict_type(model, SHARDED, None, ShardedOptimStateDictConfig(offload_to_cpu=False)):
        states = [FSDP.optim_state_dict(model, optimizer), FSDP.sharded_optim_state_dict(model, optimizer)]
    for state in states:
        moments = {name: values["exp_avg"] for name, values in state["state"].items()}
        assert all(isinstance(value, DTensor) for value in moments.values())
        expected = expected_by_name()["state"]
        for name, value in moments.items():
            torch.testing.assert_close(value.full_tensor(), expected[name]["exp_avg"], rtol=1e-4, atol=1e-6)
    shares = [state["state"]["first.weight"]["exp_avg"].to_local().data_ptr() for state in states]
    own = optimizer.state[model.first.weight]["exp_avg"].to_local().data_ptr()
    assert shares[0] == own
    assert shares[1] != own, "that one is a copy in host memory"


@on_ranks(2)
def test_state_is_empty_before_the_first_step_and_taken_while_the_root_is_unsharded() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    optimizer = adam(model)
    state = FSDP.optim_state_dict(model, optimizer)
    assert state["state"] == {}
    assert sorted(name for group in state["param_groups"] for name in group["params"]) == sorted(NAMES)
    model(batches(1)[0])
    assert FSDP.optim_state_dict(model, optimizer) == state
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\['params'\]\[0\]"):
        FSDP.optim_state_dict(model, adam(mlp()))


# --- loading ------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("load_directly", [False, True])
def test_state_of_each_type_is_loaded_and_training_goes_on_as_it_was(strategy: str, kind: StateDictType, load_directly: bool) -> None:
    source, its_optimizer = trained(sharding_strategy=ShardingStrategy[strategy])
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    optimizer = adam(model)
    model.load_state_dict(source.state_dict())
    FSDP.set_state_dict_type(source, kind)
    FSDP.set_state_dict_type(model, kind)
    saved = FSDP.optim_state_dict(source, its_optimizer)
    before = copy.deepcopy(saved) if kind is FULL else None
    state = FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=load_directly)
    if not load_directly:
        optimizer.load_state_dict(state)
    assert_steps_alike(model, optimizer, *trained_reference())
    if before is not None:
        assert_same_state(saved, before)


@on_ranks(2)
def test_state_that_only_rank_0_has_is_sent_to_the_others() -> None:
    source, its_optimizer = trained()
    config = FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(source, FULL, None, config)
    saved = FSDP.optim_state_dict(source, its_optimizer)
    assert bool(saved) is (dist.get_rank() == 0)
    for loads in (
        lambda model, optimizer: FSDP.optim_state_dict_to_load(model, optimizer, saved),
        lambda model, optimizer: FSDP.scatter_full_optim_state_dict(saved or None, model, optim=optimizer),
    ):
        model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
        optimizer = adam(model)
        model.load_state_dict(source.state_dict())
        FSDP.set_state_dict_type(model, FULL, None, config)
        optimizer.load_state_dict(loads(model, optimizer))
        assert_steps_alike(model, optimizer, *trained_reference())


@on_ranks(2)
def test_older_functions_load_what_they_saved() -> None:
    source, its_optimizer = trained()
    full = FSDP.full_optim_state_dict(source, its_optimizer, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(source, its_optimizer)
    for loads in (
        lambda model, optimizer: FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
        lambda model, optimizer: FSDP.shard_full_optim_state_dict(full, model, optim_input=groups(model)),
        lambda model, optimizer: FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
    ):
        model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
        optimizer = adam(model)
        model.load_state_dict(source.state_dict())
        optimizer.load_state_dict(loads(model, optimizer))
        assert_steps_alike(model, optimizer, *trained_reference())


@on_ranks(2)
def test_state_goes_to_an_unsharded_optimizer_and_comes_from_one() -> None:
    source, its_optimizer = trained()
    full = FSDP.full_optim_state_dict(source, its_optimizer, rank0_only=False)
    reference, optimizer = trained_reference()
    fresh = mlp()
    loaded = adam(fresh)
    fresh.load_state_dict(source.state_dict())
    numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, fresh, optim=loaded)
    loaded.load_state_dict(numbered)
    raw = optimizer.state_dict()
    for number, values in raw["state"].items():
        torch.testing.assert_close(loaded.state_dict()["state"][number]["exp_avg"], values["exp_avg"], rtol=1e-4, atol=1e-6)

    named = FSDP.rekey_optim_state_dict(raw, OptimStateKeyType.PARAM_NAME, reference, optim_input=groups(reference))
    assert_same_state(named, expected_by_name())
    assert FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_NAME, reference) is named
    for state in (named, raw):  # numbers are taken as well: the same parameters in the same order
        model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
        optim = adam(model)
        model.load_state_dict(reference.state_dict())
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, state))
        assert_steps_alike(model, optim, *trained_reference())


@on_ranks(2)
def test_state_of_torchs_fsdp1_is_loaded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torchs.FullyShardedDataParallel(
            mlp(), auto_wrap_policy=torchs.wrap.ModuleWrapPolicy({Block}), device_id=torch.device(device_type())
        )
        its_optimizer = AdamW(theirs.parameters(), lr=0.01)
        for x in batches(2):
            forward_backward(theirs, own_chunk(x))
            its_optimizer.step()
            its_optimizer.zero_grad()
        model_state = theirs.state_dict()
        saved = torchs.FullyShardedDataParallel.optim_state_dict(theirs, its_optimizer)
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    optimizer = AdamW(model.parameters(), lr=0.5)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    assert optimizer.param_groups[0]["lr"] == 0.01
    reference = mlp()
    plain = AdamW(reference.parameters(), lr=0.01)
    for x in batches(2):
        forward_backward(reference, x)
        plain.step()
        plain.zero_grad()
    assert_steps_alike(model, optimizer, reference, plain)


@on_ranks(1)
def test_optimizers_with_names_get_names() -> None:
    model, optimizer = trained()
    saved = FSDP.optim_state_dict(model, optimizer)
    named = FSDP.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)
    assert set(named["state"]) == set(NAMES)
    assert FSDP.optim_state_dict(model, optimizer, named)["state"].keys() == saved["state"].keys()


@on_ranks(2)
def test_what_does_not_fit_is_named() -> None:
    model, optimizer = trained()
    saved = FSDP.optim_state_dict(model, optimizer)

    def loads(change: Any) -> None:
        state = copy.deepcopy(saved)
        change(state)
        FSDP.optim_state_dict_to_load(model, optimizer, state)

    with pytest.raises(CheckpointError, match=r"\[1\]: last.bias is the optimizer's alone[\s\S]*\[1\]: more was saved alone"):
        loads(lambda state: state["param_groups"][1].update(params=["more", "last.weight", "first.bias", "first.weight"]))
    with pytest.raises(CheckpointError, match=r"first.weight: exp_avg \(3, 3\), and the parameter is \(10, 7\)"):
        loads(lambda state: state["state"]["first.weight"].update(exp_avg=torch.ones(3, 3)))
    with pytest.raises(CheckpointError, match="more is not a parameter"):
        loads(lambda state: state["state"].update(more={}))
    with pytest.raises(CheckpointError, match="1 groups were saved"):
        loads(lambda state: state["param_groups"].pop())
    with pytest.raises(CheckpointError, match="no param_groups"):
        loads(lambda state: state.clear())
    with pytest.raises(CheckpointError, match="has 2 numbered parameters"):
        loads(lambda state: state.update(state={}, param_groups=[{"params": [0, 1]}]))
    with pytest.raises(CheckpointError, match="optim_input"):
        FSDP.shard_full_optim_state_dict(saved, model, optim_input=[nn.Parameter(torch.ones(1))])
