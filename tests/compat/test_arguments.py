"""Each argument of ``FSDP(module, ...)``. The oracle is the unsharded model, or torch's FSDP1 where it works on the CPU."""

from __future__ import annotations

import copy
import warnings
from abc import ABC
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2.compat
from fsdp2.compat import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    default_auto_wrap_policy,
)
from fsdp2.compat import FullyShardedDataParallel as FSDP
from fsdp2.core.iteration.module_state import unit_of
from fsdp2.errors import ArgumentError, FSDPError, MaterializationError, MeshError, ModuleError
from harness import device_type, on_ranks
from harness.memory import PeakBytes
from harness.models import MLP, Block, batches, mlp
from harness.training import assert_equal_training, fed_own_chunk, fed_whole, own_chunk

BLOCKS = ModuleWrapPolicy({Block})


@contextmanager
def quiet() -> Any:
    """Torch's FSDP1 is deprecated, and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- what comes back ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_module_is_returned_itself_with_names_types_and_attributes() -> None:
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    wrapped = FSDP(model, auto_wrap_policy=BLOCKS)
    assert wrapped is model
    assert isinstance(wrapped, FSDP)
    assert isinstance(wrapped, MLP)
    assert isinstance(wrapped, fsdp2.FSDPModule)
    assert isinstance(wrapped.blocks[1], FSDP)
    assert not isinstance(wrapped.first, FSDP)
    assert [name for name, _ in wrapped.named_parameters()] == names
    assert all(isinstance(param, DTensor) for param in wrapped.parameters())
    assert isinstance(wrapped.module, MLP)
    assert not isinstance(wrapped.module, FSDP)
    assert list(wrapped.module.parameters()) == list(model.parameters())


@on_ranks(2)
def test_name_of_the_class_inside_is_the_users() -> None:
    """Scripts choose by ``type(model.module).__name__``, and transformers writes it into config.json."""
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS)
    assert type(model.module).__name__ == type(model.module).__qualname__ == "MLP"
    assert type(model.blocks[0]).__name__ == "Block"
    assert repr(model).startswith("MLP(")


def doubled_by(kind: Any) -> Any:
    """A subclass of ``kind``'s FSDP, as adapters have: arguments and attributes of its own, overridden methods."""

    class Doubled(kind.FullyShardedDataParallel):
        calls = 0

        def __init__(self, module: nn.Module, *, factor: float, **kwargs: Any) -> None:
            self.factor = factor
            super().__init__(module, device_id=torch.device("cpu"), use_orig_params=True, **kwargs)
            self.tracked = [self.factor]

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            type(self).calls += 1
            return super().forward(*args, **kwargs) * self.factor

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.tracked.append("saved")
            return super().state_dict(*args, **kwargs)

    return Doubled


@on_ranks(2)
@pytest.mark.parametrize("by_policy", [False, True])
def test_subclass_of_fsdp_trains_and_saves_as_torchs(by_policy: bool) -> None:
    losses, states = {}, {}
    for kind in (torchs, fsdp2.compat):
        cls, policy = doubled_by(kind), kind.wrap.ModuleWrapPolicy({Block}) if kind is torchs else BLOCKS
        with quiet():
            model = cls(mlp(), factor=2.0, **({"auto_wrap_policy": policy} if by_policy else {}))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses[kind] = []
            for x in batches(3):
                loss = model(own_chunk(x)).square().mean()
                loss.backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses[kind].append(loss.item())
            states[kind] = model.state_dict()
        assert isinstance(model, cls)
        assert isinstance(model, kind.FullyShardedDataParallel)
        assert not isinstance(model.module.blocks[0], cls), "a policy's modules are plain FSDP"
        assert isinstance(model.module.blocks[0], kind.FullyShardedDataParallel) is by_policy
        assert model.tracked == [2.0, "saved"]
    assert losses[fsdp2.compat] == pytest.approx(losses[torchs], rel=1e-6)
    assert states[fsdp2.compat].keys() == states[torchs].keys()
    for name, value in states[fsdp2.compat].items():
        torch.testing.assert_close(value, states[torchs][name], rtol=1e-5, atol=1e-5)


class Abstract(ABC, nn.Linear):
    pass


@on_ranks(2)
def test_subclass_of_fsdp_is_the_module_with_the_methods_of_both() -> None:
    cls, inside = doubled_by(fsdp2.compat), mlp()
    model = cls(inside, factor=3.0)
    assert model is inside
    assert isinstance(model, MLP)
    assert not isinstance(FSDP(nn.Linear(2, 2)), cls)
    other = copy.deepcopy(model)
    assert isinstance(other, cls)
    assert (other.factor, other.calls) == (3.0, 0)
    model.load_state_dict(other.state_dict())
    with fsdp2.compat.enable_wrap(wrapper_cls=cls, factor=4.0):
        assert fsdp2.compat.wrap(nn.Linear(2, 2)).factor == 4.0
    abstract = cls(Abstract(2, 2), factor=5.0)
    weight, bias = (param.full_tensor() for param in abstract.parameters())
    assert torch.equal(abstract(torch.ones(1, 2)), 5.0 * nn.functional.linear(torch.ones(1, 2), weight, bias))
    sliced = cls(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), factor=1.0)[:1]
    assert type(sliced) is nn.Sequential


@on_ranks(2)
def test_sequential_can_still_be_indexed_and_sliced() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    assert isinstance(model[0], nn.Linear)
    assert type(model[:2]) is nn.Sequential


@on_ranks(2)
def test_wrong_modules_are_refused() -> None:
    with pytest.raises(ModuleError, match="ModuleList"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ModuleError, match="already applied"):
        FSDP(FSDP(nn.Linear(2, 2)))
    with pytest.raises(ModuleError, match="auto_wrap_policy for a Sequential with FSDP modules below it"):
        FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))), auto_wrap_policy=BLOCKS)


# --- strategies and ranks -----------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", None])
def test_strategy_trains_as_the_unsharded_model(strategy: str | None) -> None:
    chosen = None if strategy is None else ShardingStrategy[strategy]
    reference, model = mlp(), FSDP(mlp(), sharding_strategy=chosen, auto_wrap_policy=BLOCKS)
    placement = Replicate() if strategy == "NO_SHARD" else Shard(0)
    assert all(param.placements == (placement,) for param in model.parameters())
    assert model.sharding_strategy is (chosen or ShardingStrategy.FULL_SHARD)
    assert_equal_training(fed_own_chunk(model, batches()), fed_whole(reference, batches()))


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_strategy_decides_which_units_stay_unsharded_after_forward(strategy: str) -> None:
    model = FSDP(mlp(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=BLOCKS)
    model(batches(1)[0])
    kept = [unit_of(module).groups[0].is_unsharded for module in (*model.blocks, model)]
    keeps = strategy != "FULL_SHARD"
    assert kept == [keeps, keeps, keeps, True], "the root is needed first in backward"


@on_ranks(2)
def test_no_shard_keeps_one_copy_of_the_parameters() -> None:
    model = nn.Linear(64, 64, bias=False)
    FSDP(model, sharding_strategy=ShardingStrategy.NO_SHARD)
    with PeakBytes() as memory:
        with torch.no_grad():
            model(torch.ones(1, 64))
        assert memory.peak < 1.5 * 64 * 64 * 4, "the weight itself, and no second copy"


@on_ranks(4)
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
@pytest.mark.parametrize("by", ["process_group", "device_mesh", "unnamed device_mesh", "environment"])
def test_hybrid_strategies_take_groups_a_mesh_or_nodes(strategy: ShardingStrategy, by: str) -> None:
    reference = mlp()
    rank = dist.get_rank()
    arguments: dict[str, Any] = {}
    if by == "process_group":  # the pair is (shard, replicate)
        shard = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        replicate = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        arguments["process_group"] = (shard, replicate)
    elif by != "environment":
        names = ("replicate", "shard") if by == "device_mesh" else None
        arguments["device_mesh"] = init_device_mesh(device_type(), (2, 2), mesh_dim_names=names)
    with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "2"}):
        model = FSDP(mlp(), sharding_strategy=strategy, auto_wrap_policy=BLOCKS, **arguments)
    assert model.process_group.size() == 2
    assert len({id(unit_of(module).groups[0].mesh.mesh) for module in (model, *model.blocks)}) == 1, "one mesh for all"
    assert next(model.parameters()).placements == (Replicate(), Shard(0))
    assert next(model.parameters()).device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert_equal_training(fed_own_chunk(model, batches()), fed_whole(reference, batches()))


@on_ranks(4)
def test_process_group_of_some_ranks_shards_over_them() -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    model = FSDP(nn.Linear(4, 4), process_group=group)
    assert model.process_group is group
    assert (model.rank, model.world_size) == (dist.get_rank() % 2, 2)
    assert model.weight.to_local().shape == (2, 4)
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))
    assert FSDP(nn.Linear(4, 4), device_mesh=mesh["b"]).weight.to_local().shape == (2, 4)


@on_ranks(2)
def test_a_mesh_whose_second_axis_has_one_rank_shards_over_the_first_as_fsdp1_does() -> None:
    x = torch.ones(3, 4, device=device_type())
    for names in (("dp", "tp"), None):
        mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=names)
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            torch.manual_seed(0)
            whole = nn.Linear(4, 4, device=device_type())
            model = FSDP(copy.deepcopy(whole), device_mesh=mesh, sharding_strategy=strategy)
            for each in (whole, model):
                each(x * (1 if each is whole else 2 * dist.get_rank())).sum().backward()
            with FSDP.summon_full_params(model, with_grads=True):
                torch.testing.assert_close(model.weight.grad, whole.weight.grad)
    with pytest.raises(MeshError, match="2-D device_mesh for FULL_SHARD"):
        FSDP(nn.Linear(2, 2), device_mesh=init_device_mesh(device_type(), (1, 2)))


@on_ranks(2)
def test_wrong_groups_meshes_and_strategies_are_refused() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    with pytest.raises(ArgumentError, match="both process_group and device_mesh"):
        FSDP(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(MeshError, match="1-D device_mesh for HYBRID_SHARD"):
        FSDP(nn.Linear(2, 2), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(ArgumentError, match=r"for HYBRID_SHARD[\s\S]*pair of process groups"):
        FSDP(nn.Linear(2, 2), process_group=dist.group.WORLD, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(ArgumentError, match="process_group='nccl'"):
        FSDP(nn.Linear(2, 2), process_group="nccl")
    with pytest.raises(ArgumentError, match="sharding_strategy='FULL_SHARD'"):
        FSDP(nn.Linear(2, 2), sharding_strategy="FULL_SHARD")
    with pytest.raises(ArgumentError, match=r"device_id=1\.5"):
        FSDP(nn.Linear(2, 2), device_id=1.5)
    of_rank_0 = DeviceMesh(device_type(), [0])
    if dist.get_rank() == 1:
        with pytest.raises(MeshError, match="FSDP got a mesh that this rank is not part of"):
            FSDP(nn.Linear(2, 2), device_mesh=of_rank_0)
    for size in ("3", "three"):
        said = f"LOCAL_WORLD_SIZE.*{size}.*2 ranks"
        with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": size}), pytest.raises(ArgumentError, match=said):
            FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@on_ranks(2)
def test_torchs_enums_and_dataclasses_are_taken_for_ours() -> None:
    model = FSDP(
        nn.Linear(4, 4),
        sharding_strategy=torchs.ShardingStrategy.NO_SHARD,
        backward_prefetch=torchs.BackwardPrefetch.BACKWARD_POST,
        mixed_precision=torchs.MixedPrecision(param_dtype=torch.bfloat16),
        cpu_offload=torchs.CPUOffload(offload_params=True),
    )
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert unit_of(model).options.backward_prefetch == "post"
    assert model(torch.ones(1, 4)).dtype is torch.bfloat16


# --- policies and what goes with them -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_custom_policy_overrides_arguments_module_by_module() -> None:
    reference, model = mlp(), mlp()
    FSDP(
        model,
        auto_wrap_policy=CustomPolicy(
            lambda module: {"sharding_strategy": ShardingStrategy.NO_SHARD} if module is model.last else isinstance(module, Block)
        ),
    )
    assert model.last.sharding_strategy is ShardingStrategy.NO_SHARD
    assert model.blocks[0].sharding_strategy is ShardingStrategy.FULL_SHARD
    assert_equal_training(fed_own_chunk(model, batches()), fed_whole(reference, batches()))
    with pytest.raises(ArgumentError, match="does not have: strategy"):
        FSDP(mlp(), auto_wrap_policy=CustomPolicy(lambda module: {"strategy": 1} if isinstance(module, Block) else False))


@on_ranks(2)
def test_first_release_spelling_works() -> None:
    model = FSDP(mlp(), fsdp_auto_wrap_policy=default_auto_wrap_policy, cpu_offload=CPUOffload(offload_params=True))
    assert [name for name, module in model.named_modules() if isinstance(module, FSDP)] == [""], "nothing has 100 M parameters"


@on_ranks(2)
@pytest.mark.parametrize("what", ["modules", "modules, replicated inside", "states that are modules", "states that are parameters"])
def test_ignored_parameters_stay_plain_and_are_not_reduced(what: str) -> None:
    reference, model = mlp(), mlp()
    ignored = model.blocks[1]
    buffer = torch.zeros(2)
    ignored.register_buffer("kept", buffer)
    kept = buffer.data_ptr()
    if what == "modules, replicated inside":
        replicate(ignored.up)
    params = {name for name, _ in model.named_parameters() if name.startswith("blocks.1.")}
    arguments = {
        "modules": {"ignored_modules": [ignored]},
        "modules, replicated inside": {"ignored_modules": [ignored]},
        "states that are modules": {"ignored_states": [ignored]},
        "states that are parameters": {"ignored_states": list(ignored.parameters())},
    }[what]
    FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}), **arguments)
    assert {name for name, param in model.named_parameters() if not isinstance(param, DTensor)} == params
    assert buffer.data_ptr() == kept
    x = batches(1)[0]
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    for name, param in reference.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(grad.full_tensor() if isinstance(grad, DTensor) else grad, param.grad)


@on_ranks(2)
def test_wrong_ignored_things_are_refused() -> None:
    model = mlp()
    with pytest.raises(ArgumentError, match="both ignored_modules and ignored_states"):
        FSDP(model, ignored_modules=[], ignored_states=[])
    with pytest.raises(ArgumentError, match="ignored_modules with a str"):
        FSDP(model, ignored_modules=["blocks.1"])
    with pytest.raises(ArgumentError, match="modules and parameters"):
        FSDP(model, ignored_states=[model.first, model.last.bias])
    FSDP(model.first)
    with pytest.raises(ArgumentError, match="to ignore a Linear"):
        FSDP(model, ignored_modules=[model.first])


# --- values at the start ------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - self.mean.to(x.dtype)) * self.count


@on_ranks(3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_sync_module_states_gives_all_ranks_the_first_ones_values(strategy: str) -> None:
    first = nn.Sequential(Buffered(), nn.Linear(5, 5))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Buffered(), nn.Linear(5, 5))
    strategy_ = ShardingStrategy[strategy]
    FSDP(model, sync_module_states=True, sharding_strategy=strategy_, auto_wrap_policy=ModuleWrapPolicy({Buffered}))
    for name, value in model.state_dict().items():
        assert torch.equal(value, first.state_dict()[name]), name


@on_ranks(4)
def test_sync_module_states_reaches_every_rank_of_a_hybrid_mesh() -> None:
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model = FSDP(Buffered(), sync_module_states=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    torch.manual_seed(0)
    for name, value in Buffered().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@on_ranks(2)
def test_meta_modules_are_reset_as_fsdp1_resets_them() -> None:
    """Same order of modules, so the same random numbers: the values are those that torch's FSDP1 makes."""
    values = {}
    for which in ("torch", "ours"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 2))
        torch.manual_seed(3)
        with quiet():
            if which == "torch":
                policy = torchs.wrap.ModuleWrapPolicy({nn.Sequential})
                model = torchs.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device(device_type()))
            else:
                FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
        values[which] = model.state_dict()
    assert values["torch"].keys() == values["ours"].keys()
    for name, value in values["ours"].items():
        assert torch.equal(value, values["torch"][name]), name


@on_ranks(2)
def test_param_init_fn_is_called_on_meta_modules_and_ties_hold() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        model[1][0].weight = model[0].weight
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        module.to_empty(device=device_type(), recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 2.0)

    FSDP(model, param_init_fn=init)
    assert seen == ["Sequential", "Linear", "Sequential", "Linear", "LayerNorm"], "a module's own tensors only, and parents first"
    assert model[1][0].weight is model[0].weight
    assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in model.state_dict().values())


@on_ranks(2)
def test_rank_0_loads_and_the_others_start_on_the_meta_device() -> None:
    """The pattern of FSDP1's documentation for large models."""
    if dist.get_rank() == 0:
        model = mlp()
    else:
        with torch.device("meta"):
            model = MLP()
    to_empty = None if dist.get_rank() == 0 else lambda module: module.to_empty(device=device_type(), recurse=False)
    FSDP(model, sync_module_states=True, param_init_fn=to_empty, auto_wrap_policy=BLOCKS)
    for name, value in mlp().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


class Helpless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device="meta"))


@on_ranks(2)
def test_meta_modules_that_cannot_be_initialized_are_named() -> None:
    with pytest.raises(MaterializationError, match=r"Helpless[\s\S]*param_init_fn"):
        FSDP(Helpless())
    with pytest.raises(MaterializationError, match=r"weight \(2,\)"):
        FSDP(Helpless(), param_init_fn=lambda module: None)
    with pytest.raises(ArgumentError, match="param_init_fn='reset'"):
        FSDP(Helpless(), param_init_fn="reset")


# --- devices ------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("device_id", [None, 0, "device", torch.device("cpu")])
def test_device_id_may_be_left_out_or_be_anything_that_names_the_device(device_id: Any) -> None:
    model = FSDP(nn.Linear(4, 4), device_id=device_type() if device_id == "device" else device_id)
    expected = "cpu" if device_id == torch.device("cpu") else device_type()
    assert model.weight.to_local().device.type == expected
    assert model.compute_device.type == expected


@on_ranks(2)
def test_offloaded_model_trains_on_the_host() -> None:
    reference, model = mlp(), FSDP(mlp(), cpu_offload=CPUOffload(offload_params=True), auto_wrap_policy=BLOCKS)
    assert all(param.to_local().device.type == "cpu" for param in model.parameters())
    assert all(group.options.offload for group in unit_of(model).groups)
    assert_equal_training(fed_own_chunk(model, batches()), fed_whole(reference, batches()))
    with pytest.raises(ArgumentError, match="cpu_offload='cpu'"):
        FSDP(mlp(), cpu_offload="cpu")


# --- mixed precision ----------------------------------------------------------------------------------------------------------


class Dtypes(nn.Module):
    """Notes what its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("index", torch.arange(3))
        self.inner: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"input": x.dtype, "weight": self.weight.dtype, "scale": self.scale.dtype, "index": self.index.dtype}
        x = x.to(self.weight.dtype) @ self.weight
        return x if self.inner is None else self.inner(x)


def nested() -> Dtypes:
    model = Dtypes()
    model.inner = Dtypes()
    return model


def wrapped_both(cls: Any, model: Dtypes, policy: Any, **arguments: Any) -> tuple[nn.Module, Dtypes, Dtypes]:
    outer, inner = model, model.inner
    assert inner is not None
    model.inner = cls(inner, mixed_precision=policy, **arguments)
    return cls(model, mixed_precision=policy, **arguments), outer, inner


@on_ranks(2)
@pytest.mark.parametrize("cast_forward_inputs", [False, True])
@pytest.mark.parametrize("cast_root_forward_inputs", [False, True])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float64])
def test_dtypes_in_forward_are_those_of_fsdp1(
    cast_forward_inputs: bool, cast_root_forward_inputs: bool, input_dtype: torch.dtype
) -> None:
    arguments = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "buffer_dtype": torch.float16,
        "cast_forward_inputs": cast_forward_inputs,
        "cast_root_forward_inputs": cast_root_forward_inputs,
    }
    with quiet():
        torchs_model, *their_parts = wrapped_both(
            torchs.FullyShardedDataParallel,
            nested(),
            torchs.MixedPrecision(**arguments),
            device_id=torch.device(device_type()),
        )
        torchs_model(torch.ones(2, 3, dtype=input_dtype))
    model, *parts = wrapped_both(FSDP, nested(), MixedPrecision(**arguments))
    output = model(torch.ones(2, 3, dtype=input_dtype))
    assert [part.seen for part in parts] == [part.seen for part in their_parts]
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert model.weight.grad.dtype is torch.float32


@on_ranks(2)
def test_reduce_dtype_defaults_to_param_dtype_and_may_stand_alone() -> None:
    def reduce_dtype(**arguments: Any) -> torch.dtype:
        return unit_of(FSDP(nn.Linear(2, 2), mixed_precision=MixedPrecision(**arguments))).groups[0].plan.reduce_dtype

    assert reduce_dtype(param_dtype=torch.bfloat16) is torch.bfloat16
    assert reduce_dtype(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) is torch.float32
    assert reduce_dtype(reduce_dtype=torch.bfloat16) is torch.bfloat16
    assert reduce_dtype() is torch.float32


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_low_precision_gradients_are_kept_if_asked(offload: bool) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = FSDP(mlp(), mixed_precision=policy, auto_wrap_policy=BLOCKS, cpu_offload=CPUOffload(offload_params=offload))
    reference = FSDP(mlp(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), auto_wrap_policy=BLOCKS)
    for each in (model, reference):
        for x in batches(2):  # the second is added to the first
            each(x).square().mean().backward()
    assert all(param.grad.dtype is torch.bfloat16 for param in model.parameters())
    assert all(param.grad.dtype is torch.float32 for param in reference.parameters())
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local().float(), theirs.grad.to_local(), rtol=2**-6, atol=2**-6)
    norm = model.clip_grad_norm_(0.1)
    assert norm.dtype is torch.bfloat16
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()


@on_ranks(2)
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(torch.bfloat16, torch.float32), (None, torch.bfloat16), (torch.float16, None)], ids=str
)
def test_kept_low_precision_gradients_have_the_dtype_of_parameters_in_forward_as_in_fsdp1(param_dtype: Any, reduce_dtype: Any) -> None:
    """They had the dtype of the reduction: bf16 beside fp32 moments, which AdamW refuses, where FSDP1 gives fp32."""
    dtypes, losses = {}, {}
    for kind in (torchs, fsdp2.compat):
        policy = kind.MixedPrecision(param_dtype, reduce_dtype, keep_low_precision_grads=True)
        with quiet():
            model = kind.FullyShardedDataParallel(mlp(), mixed_precision=policy, device_id=torch.device("cpu"), use_orig_params=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses[kind] = []
            for x in batches(3):
                loss = model(own_chunk(x)).float().square().mean()
                loss.backward()
                dtypes[kind] = {param.grad.dtype for param in model.parameters() if param.grad is not None}
                optimizer.step()
                optimizer.zero_grad()
                losses[kind].append(loss.item())
    assert dtypes[fsdp2.compat] == dtypes[torchs] == {param_dtype or torch.float32}
    assert losses[fsdp2.compat] == pytest.approx(losses[torchs], rel=2**-7)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.down = nn.Linear(4, 2)
        self.dtypes: list[torch.dtype] = []
        self.norm.register_forward_hook(lambda module, args, output: self.dtypes.extend([args[0].dtype, module.weight.dtype]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x))
        self.dtypes.append(x.dtype)
        return self.down(x)


@on_ranks(2)
def test_batch_norm_runs_in_fp32_and_gives_back_what_it_got_like_fsdp1s() -> None:
    arguments = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
    torch.manual_seed(0)
    start = WithNorm()
    mine, torchs_own = copy.deepcopy(start), copy.deepcopy(start)
    mine.norm._forward_hooks.clear()  # of the copies, that note into the original
    torchs_own.norm._forward_hooks.clear()
    with quiet():
        theirs = torchs.FullyShardedDataParallel(
            torchs_own,
            mixed_precision=torchs.MixedPrecision(**arguments),
            auto_wrap_policy=torchs.wrap.ModuleWrapPolicy({nn.Bilinear}),
            device_id=torch.device(device_type()),
        )
    FSDP(mine, mixed_precision=MixedPrecision(**arguments), auto_wrap_policy=ModuleWrapPolicy({nn.Bilinear}))
    assert isinstance(mine.norm, FSDP)
    assert mine.norm.running_mean.dtype is torch.float32
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    with quiet():
        expected = theirs(x)
        expected.sum().backward()
    output = mine(x)
    output.sum().backward()
    assert mine.dtypes == torchs_own.dtypes == [torch.bfloat16]
    assert torch.equal(output, expected)
    assert mine.norm.weight.grad.dtype is torch.float32
    assert torch.equal(mine.norm.running_mean, torchs_own.norm.module.running_mean)


@on_ranks(2)
def test_wrong_mixed_precision_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"mixed_precision=torch\.bfloat16"):
        FSDP(nn.Linear(2, 2), mixed_precision=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"buffer_dtype=torch\.int8"):
        FSDP(nn.Linear(2, 2), mixed_precision=MixedPrecision(buffer_dtype=torch.int8))
    with pytest.raises(FSDPError, match="param_dtype='bf16'"):
        FSDP(nn.Linear(2, 2), mixed_precision=MixedPrecision(param_dtype="bf16"))


# --- order --------------------------------------------------------------------------------------------------------------------


def recorded_backward(backward_prefetch: BackwardPrefetch | None) -> list[str]:
    """What happens in the second iteration's backward: gathers and reductions of the blocks, and their gradients' computation."""
    model = FSDP(mlp(), auto_wrap_policy=BLOCKS, backward_prefetch=backward_prefetch)
    events: list[str] = []
    for index, block in enumerate(model.blocks):
        group = unit_of(block).groups[0]
        gradients = group.gradients
        issue, reduce = group.issue, gradients.reduce

        def noted_issue(*args: Any, index: int = index, group: Any = group, issue: Any = issue) -> None:
            if group.state.name == "SHARDED":
                events.append(f"gather {index}")
            issue(*args)

        def noted_reduce(*args: Any, index: int = index, reduce: Any = reduce) -> Any:
            events.append(f"reduce {index}")
            return reduce(*args)

        group.issue, gradients.reduce = noted_issue, noted_reduce
        block.down.register_full_backward_hook(lambda *_, index=index: events.append(f"gradients {index}"))
    x = batches(1)[0]
    for _ in range(2):
        loss = model(x).square().mean()
        events.clear()
        loss.backward()
    return events


@on_ranks(2)
def test_backward_prefetch_says_when_the_next_unit_is_gathered() -> None:
    pre = recorded_backward(BackwardPrefetch.BACKWARD_PRE)
    assert pre == [
        "gather 2", "gather 1", "gradients 2", "reduce 2", "gather 0", "gradients 1", "reduce 1", "gradients 0", "reduce 0"
    ]  # fmt: skip
    post = recorded_backward(BackwardPrefetch.BACKWARD_POST)
    assert post == [
        "gather 2", "gradients 2", "gather 1", "reduce 2", "gradients 1", "gather 0", "reduce 1", "gradients 0", "reduce 0"
    ]  # fmt: skip
    never = recorded_backward(None)
    assert never == [
        "gather 2", "gradients 2", "reduce 2", "gather 1", "gradients 1", "reduce 1", "gather 0", "gradients 0", "reduce 0"
    ]  # fmt: skip


@on_ranks(2)
def test_other_switches_change_no_number() -> None:
    reference = mlp()
    steps = fed_whole(reference, batches())
    for arguments in (
        {"forward_prefetch": True},
        {"limit_all_gathers": False},
        {"use_orig_params": True},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"backward_prefetch": None},
    ):
        model = FSDP(mlp(), auto_wrap_policy=BLOCKS, **arguments)
        assert_equal_training(fed_own_chunk(model, batches()), steps)
        assert all(getattr(model, name, value) == value for name, value in arguments.items())
