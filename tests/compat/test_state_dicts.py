"""Model state dicts of every type, saved and loaded, also by ``torch.distributed.checkpoint``. The oracle is the unsharded model."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint import full_state_dict
from fsdp2.checkpoint.training_state import named_model_state
from fsdp2.compat import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from fsdp2.compat import FullyShardedDataParallel as FSDP
from fsdp2.errors import ArgumentError, ModuleError
from harness import device_type, on_ranks
from harness.memory import PeakBytes, covered_bytes
from harness.models import MLP, Block, batches, mlp, transformer

BLOCKS = ModuleWrapPolicy({Block})
FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
STREAMED = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is Tensor, name
        assert torch.equal(found[name].cpu(), value), name


# --- saving -------------------------------------------------------------------------------------------------------------------


@on_ranks(1, 3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("offload", [False, True])
def test_state_dict_is_whole_by_default(strategy: str, offload: bool) -> None:
    model = FSDP(
        mlp(),
        auto_wrap_policy=BLOCKS,
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload_params=offload),
    )
    model(batches(1)[0])
    state = model.state_dict()
    assert_same(state, mlp().state_dict())
    state["first.weight"].zero_()
    assert torch.equal(model.state_dict()["first.weight"], mlp().first.weight), "it shares nothing with the model"


@on_ranks(4)
def test_whole_state_is_gathered_from_a_hybrid_mesh_and_goes_to_its_first_rank() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    assert_same(model.state_dict(), mlp().state_dict())
    with FSDP.state_dict_type(model, FULL, STREAMED):
        state = model.state_dict()
    assert_same(state, mlp().state_dict() if dist.get_rank() == 0 else {})


@on_ranks(2)
def test_streamed_state_is_on_rank_0s_host_and_ties_are_one_tensor() -> None:
    model = transformer(tied=True)
    FSDP(model.embedding)
    FSDP(model)
    with FSDP.state_dict_type(model, FULL, STREAMED):
        state = model.state_dict()
    assert_same(state, transformer(tied=True).state_dict() if dist.get_rank() == 0 else {})
    if state:
        assert state["embedding.weight"] is state["head.weight"]
        assert all(value.device.type == "cpu" for value in state.values())


class Memory(PeakBytes):
    """Collectives leave storages behind whose Python object is alive and whose bytes are gone."""

    def now(self) -> list[tuple[int, int]]:
        pieces = []
        for reference in self._storages.values():
            with contextlib.suppress(RuntimeError):
                storage = reference()
                if storage is not None and storage.nbytes():
                    pieces.append((storage.data_ptr(), storage.nbytes()))
        return pieces


@on_ranks(2)
def test_memory_of_a_streamed_state_is_the_result_and_one_whole_tensor() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
    whole = 128 * 128 * 4
    FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with FSDP.state_dict_type(model, FULL, STREAMED), Memory() as memory:
        memory.touch([param.to_local() for param in model.parameters()])
        before = covered_bytes(memory.now())
        memory.reset()
        state = model.state_dict()
        result = 8 * whole if dist.get_rank() == 0 else 0
        assert memory.peak - before <= result + 3 * whole, "what is gathered, in pieces and put together, and what gloo still holds"
    assert bool(state) is (dist.get_rank() == 0)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.inner = nn.BatchNorm1d(5)


@on_ranks(2)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_cast_buffers_are_saved_in_their_own_dtype(kind: StateDictType) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = nn.Sequential(FSDP(Buffered(), mixed_precision=policy), nn.Linear(2, 2))
    assert model[0].mean.dtype is model[0].inner.running_var.dtype is model[0].scratch.dtype is torch.bfloat16
    with FSDP.state_dict_type(model, kind):
        state = model.state_dict()
    assert state["0.mean"].dtype is state["0.inner.running_var"].dtype is torch.float32
    assert state["0.count"].dtype is torch.int64
    assert torch.equal(state["0.mean"], torch.tensor([1.0, 2.0, 3.0]))
    model.load_state_dict(state)
    assert model[0].mean.dtype is torch.bfloat16


@on_ranks(2)
@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
def test_sharded_and_local_state_are_dtensors(kind: StateDictType) -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    config = (ShardedStateDictConfig if kind is SHARDED else LocalStateDictConfig)(offload_to_cpu=True)
    for each in (None, config):
        with FSDP.state_dict_type(model, kind, each):
            state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert_same({name: value.full_tensor() for name, value in state.items()}, mlp().state_dict())
        shares = state["first.weight"].to_local().data_ptr() == model.first.weight.to_local().data_ptr()
        assert shares is (each is None)


@on_ranks(2)
def test_state_below_plain_modules_has_prefixes_and_their_tensors() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"plain": nn.Linear(2, 3), "sharded": mlp()})

    reference = build()
    torch.manual_seed(0)
    model = build()
    FSDP(model["sharded"], auto_wrap_policy=BLOCKS)
    assert_same(model.state_dict(), reference.state_dict())
    with FSDP.state_dict_type(model, FULL, STREAMED):
        names = list(model.state_dict(prefix="a."))
    plain = ["a.plain.weight", "a.plain.bias"]
    assert (names == plain) is (dist.get_rank() != 0)


@on_ranks(2)
def test_names_have_no_prefix_of_activation_checkpointing() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    state = model.state_dict()
    assert_same(state, mlp().state_dict())
    model.load_state_dict(mlp(seed=5).state_dict())
    assert_same(model.state_dict(), mlp(seed=5).state_dict())


# --- which type ---------------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_type_is_set_for_the_tree_and_set_back() -> None:
    model = nn.Sequential(FSDP(mlp(), auto_wrap_policy=BLOCKS))
    start = FSDP.get_state_dict_type(model)
    assert start == StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert FSDP.set_state_dict_type(model, SHARDED) == start
    assert FSDP.get_state_dict_type(model).state_dict_config == ShardedStateDictConfig()

    def fail_inside() -> None:
        with FSDP.state_dict_type(model, FULL, STREAMED, FullOptimStateDictConfig(rank0_only=True)):
            assert FSDP.get_state_dict_type(model[0].blocks[1]).state_dict_config.rank0_only
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    with model[0].state_dict_type(model[0], torchs.StateDictType.FULL_STATE_DICT, torchs.FullStateDictConfig(rank0_only=True)):
        assert FSDP.get_state_dict_type(model).state_dict_config == FullStateDictConfig(rank0_only=True)


@on_ranks(1)
def test_wrong_types_are_refused() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    with pytest.raises(ArgumentError, match="FullStateDictConfig for SHARDED_STATE_DICT"):
        FSDP.set_state_dict_type(model, SHARDED, FullStateDictConfig())
    with pytest.raises(ArgumentError, match="state_dict_type='full'"):
        FSDP.set_state_dict_type(model, "full")
    with pytest.raises(ModuleError, match="no FSDP module in this Linear"):
        FSDP.get_state_dict_type(nn.Linear(2, 2))
    FSDP.set_state_dict_type(model.blocks[0], SHARDED)
    with pytest.raises(ModuleError, match="different state dict settings"):
        FSDP.get_state_dict_type(model)


# --- loading ------------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
@pytest.mark.parametrize("assign", [False, True])
def test_state_of_each_type_is_loaded(kind: StateDictType, assign: bool) -> None:
    source, model = FSDP(mlp(seed=5), auto_wrap_policy=BLOCKS), FSDP(mlp(), auto_wrap_policy=BLOCKS)
    optimized = list(model.parameters())
    model(batches(1)[0])
    with FSDP.state_dict_type(source, kind), FSDP.state_dict_type(model, kind):
        result = model.load_state_dict(source.state_dict(), assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same(model.state_dict(), mlp(seed=5).state_dict())
    assert assign or all(one is other for one, other in zip(optimized, model.parameters(), strict=True))
    if not assign:  # else the one may be the other's memory, as with any module
        with torch.no_grad():
            source.first.weight.add_(1.0)
    torch.testing.assert_close(model(batches(1)[0]), mlp(seed=5)(batches(1)[0]))


@on_ranks(2)
def test_whole_state_of_the_unsharded_model_is_loaded_below_plain_modules_and_with_another_memory_order() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), mlp(seed=seed))

    state = build(5).state_dict()
    model = build(0)
    FSDP(model[0])
    FSDP(model[1], auto_wrap_policy=BLOCKS)
    before = {name: value.clone() for name, value in state.items()}
    model.load_state_dict(state)
    assert_same(model.state_dict(), before)
    assert_same(state, before)


@on_ranks(2)
def test_what_does_not_fit_is_reported_as_by_any_module() -> None:
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    state = mlp().state_dict()
    state["first.weight"] = torch.ones(3, 3)
    state["more"] = state.pop("last.bias")
    with pytest.raises(RuntimeError, match=r"Missing key[\s\S]*last.bias[\s\S]*Unexpected key[\s\S]*more[\s\S]*size mismatch"):
        model.load_state_dict(state)


@on_ranks(2)
def test_sharded_state_of_another_mesh_is_redistributed() -> None:
    mesh = init_device_mesh(device_type(), (2, 1))
    source = FSDP(mlp(seed=5), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    model = FSDP(mlp())
    with FSDP.state_dict_type(source, SHARDED):
        model.load_state_dict(source.state_dict())
    assert_same(model.state_dict(), mlp(seed=5).state_dict())


@on_ranks(2)
def test_state_of_torchs_fsdp1_is_loaded_whole_and_sharded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torchs.FullyShardedDataParallel(
            mlp(seed=5), auto_wrap_policy=torchs.wrap.ModuleWrapPolicy({Block}), device_id=torch.device(device_type())
        )
        states = [theirs.state_dict()]
        with torchs.FullyShardedDataParallel.state_dict_type(theirs, torchs.StateDictType.SHARDED_STATE_DICT):
            states.append(theirs.state_dict())
        for state in states:
            model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
            model.load_state_dict(state)
            assert_same(model.state_dict(), mlp(seed=5).state_dict())


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_checkpoint_api_of_torch_gets_what_the_type_says_and_fsdp2s_gets_shards(kind: StateDictType) -> None:
    for model in (FSDP(mlp(), auto_wrap_policy=BLOCKS), nn.Sequential(FSDP(mlp(), auto_wrap_policy=BLOCKS))):
        FSDP.set_state_dict_type(model, kind)
        found = get_model_state_dict(model)
        assert {type(value) for value in found.values()} == {Tensor if kind is FULL else DTensor}
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        prefix = "" if isinstance(model, FSDP) else "0."
        assert_same(full, {prefix + name: value for name, value in mlp().state_dict().items()} if dist.get_rank() == 0 else {})
        if dist.get_rank() == 0:  # alone: nothing is communicated
            assert {type(value) for value in named_model_state(model).values()} == {DTensor}
        streamed = full_state_dict(model)
        assert_same(streamed, full)
        state = {prefix + name: value for name, value in mlp(seed=5).state_dict().items()} if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        FSDP.set_state_dict_type(model, FULL)
        assert torch.equal(model.state_dict()[f"{prefix}last.bias"], mlp(seed=5).last.bias)


@on_ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [(FULL, SHARDED), (SHARDED, FULL), (FULL, FULL), (SHARDED, SHARDED)])
def test_what_torchs_checkpoint_api_saves_with_one_type_is_loaded_with_the_other(
    saved: StateDictType, loaded: StateDictType, tmp_path: Path
) -> None:
    source, model = FSDP(mlp(seed=5), auto_wrap_policy=BLOCKS), FSDP(mlp(), auto_wrap_policy=BLOCKS)
    FSDP.set_state_dict_type(source, saved)
    FSDP.set_state_dict_type(model, loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=tmp_path)
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(model, state["model"])
    assert_same(full_state_dict(model), mlp(seed=5).state_dict() if dist.get_rank() == 0 else {})


@on_ranks(2)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_checkpoint_written_in_fsdp1s_manner_is_read_in_fsdp1s_manner(kind: StateDictType, tmp_path: Path) -> None:
    source, model = FSDP(mlp(seed=5), auto_wrap_policy=BLOCKS), FSDP(MLP(), auto_wrap_policy=BLOCKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FSDP.state_dict_type(source, kind):
            dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path)
        with FSDP.state_dict_type(model, kind):
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path)
            model.load_state_dict(state["model"])
    assert_same(model.state_dict(), mlp(seed=5).state_dict())
