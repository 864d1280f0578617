"""shard_placement_fn: any dim, even or not, and another mesh for some parameters of a module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import ArgumentError, MixedPrecisionPolicy, ParameterError, ShardPlacementResult, fully_shard
from harness import cpu_mesh, needs_torch, on_ranks
from harness.models import batches, mlp
from harness.sharding import shard_blocks, with_reference
from harness.training import (
    assert_equal_training,
    assert_same_bits,
    assert_trains_bitwise_as,
    fed_in_chunks,
    fed_own_chunk,
    fed_whole,
    forced,
)


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def from_the_end(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim == 2 else None


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("place", [last_dim, pytest.param(from_the_end, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gather", ["packed", pytest.param("mixed", marks=pytest.mark.slow)])
def test_uneven_shards_on_the_last_dim_train_like_the_unsharded_model(place, gather):
    model = mlp()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    with forced(gather=gather):
        shard_blocks(model, shard_placement_fn=place)
    assert model.blocks[0].up.weight.placements == (Shard(1),)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    steps = fed_own_chunk(model, batches(3))
    assert_same_bits(steps, fed_in_chunks(reference, batches(3)))
    assert_equal_training(steps, fed_whole(whole, batches(3)))


@on_ranks(3)
@pytest.mark.parametrize("after", [True, False])
def test_state_dict_of_uneven_shards_on_the_last_dim_round_trips(after):
    """torch refuses such shards; DTensor itself gathers, cuts and saves them."""
    source, target = mlp(seed=1), mlp(seed=2)
    reference = copy.deepcopy(source)
    for model in (source, target):
        fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=last_dim, reshard_after_forward=after)
    source(batches(1)[0])
    target(batches(1)[0])
    state = source.state_dict()
    assert state["blocks.0.up.weight"].to_local().shape == (13, (4, 4, 2)[torch.distributed.get_rank()])
    target.load_state_dict(state)
    for (name, ours), theirs in zip(target.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    whole = {name: tensor.full_tensor() for name, tensor in state.items()}
    cut = {name: distribute_tensor(whole[name], tensor.device_mesh, tensor.placements) for name, tensor in state.items()}
    for name, tensor in state.items():
        assert torch.equal(cut[name].to_local(), tensor.to_local()), name
    target.load_state_dict(cut, assign=True)
    x = batches(1)[0]
    torch.testing.assert_close(target(x), reference(x))


@on_ranks(4)
@pytest.mark.parametrize("size", [2])
def test_uneven_shards_on_the_last_dim_reshard_to_fewer_ranks(size):
    model, reference = with_reference(mlp())
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), shard_placement_fn=last_dim, reshard_after_forward=size)
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=last_dim)
    x = batches(1)[0].requires_grad_()
    model(x)
    between = model.blocks[0].up.weight
    assert between.device_mesh.size(-1) == size
    assert torch.equal(between.full_tensor(), reference.blocks[0].up.weight)
    model.reset_iter_state()
    assert_trains_bitwise_as(model, reference, batches(3))


@on_ranks(4)
def test_hybrid_sharding_on_the_last_dim():
    model, whole = with_reference(mlp(), fully_shard, mesh=cpu_mesh(2, 2), shard_placement_fn=last_dim)
    assert model.blocks[0].up.weight.placements == (Replicate(), Shard(1))
    assert_equal_training(fed_own_chunk(model, batches(3)), fed_whole(whole, batches(3)))


@on_ranks(2)
def test_what_the_function_returns_is_checked():
    with pytest.raises(ParameterError, match=r"(?s)first\.weight.*Shard\(2\).*first\.bias"):
        fully_shard(mlp(), mesh=cpu_mesh(), shard_placement_fn=lambda param: Shard(2))
    with pytest.raises(ParameterError, match=r"first\.weight.*Replicate"):
        fully_shard(mlp(), mesh=cpu_mesh(), shard_placement_fn=lambda param: Replicate())
    with pytest.raises(ArgumentError, match="mesh_info"):
        fully_shard(mlp(), mesh=cpu_mesh(), shard_placement_fn=lambda param: ShardPlacementResult(None, "ep"))


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("shape", [(), (4,)])
def test_what_the_function_returns_for_a_tied_parameter_is_checked(shape):
    """Symptom: ZeroDivisionError for Shard(0) of a scalar, AttributeError for Replicate()."""
    for placement, is_right in ((None, True), (Shard(0), True), (Shard(1), False), (Replicate(), False)):
        scale = nn.Parameter(torch.full(shape, 2.0))
        model = nn.Sequential(Scaled(scale), Scaled(scale))
        reference = copy.deepcopy(model)
        fully_shard(model[0], mesh=cpu_mesh())
        tied = {
            "mesh": cpu_mesh(),
            "shard_placement_fn": lambda param, placement=placement: placement if param.ndim == len(shape) else None,
        }
        if not is_right:
            with pytest.raises(ParameterError, match=r"(?s)scale.*(Replicate|Shard\(1\))"):
                fully_shard(model[1], **tied)
            continue
        fully_shard(model[1], **tied)
        fully_shard(model, mesh=cpu_mesh())
        for each in (model, reference):
            each(torch.ones(2, 4)).sum().backward()
        torch.testing.assert_close(model[0].scale.grad.full_tensor(), reference[0].scale.grad)


# --- another mesh for some parameters -----------------------------------------------------------------------------------------


class MoE(nn.Module):
    """Experts that are not parallel: each rank of ep runs all of them, here, so that the unsharded model is the oracle."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 3)
        self.experts = nn.Parameter(torch.randn(3, dim, dim) / 4)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        return x + self.out(torch.einsum("bi,eij,be->bj", x, self.experts, gates))


class ParallelExperts(nn.Module):
    """Each rank of ep computes with the first of its own experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gate(x) @ self.experts.to_local()[0].T).square().mean()


def moe() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[MoE() for _ in range(2)])


def inputs() -> list[Tensor]:
    return batches(3, shape=(12, 5))


def results(mesh: object, kind: str) -> object:
    """Ways to say: over the 2-D mesh ``mesh``, replicate over axis 0 and shard over axis 1; all of the same ranks together."""
    return {
        "ours": lambda: ShardPlacementResult(Shard(1), mesh),
        "ours_dim0": lambda: ShardPlacementResult(mesh_info=mesh),
        "torch": lambda: torch_result(mesh),
    }[kind]()


def torch_result(mesh: object) -> object:
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    return ShardPlacementResult(Shard(1), HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0))


@on_ranks(4)
@pytest.mark.parametrize("after", [None, 2, *(pytest.param(after, marks=pytest.mark.slow) for after in (True, False))])
@pytest.mark.parametrize("kind", ["ours", "ours_dim0", pytest.param("torch", marks=needs_torch("2.12", "ShardPlacementResult"))])
def test_experts_over_other_ranks_than_the_rest_train_like_the_unsharded_model(kind, after):
    model, reference = with_reference(moe())
    wide, grid = cpu_mesh(4, names=("dp",)), cpu_mesh(2, 2, names=("edp", "ep"))

    def place(param: nn.Parameter) -> object:
        return results(grid, kind) if param.ndim == 3 else None

    for layer in model:
        fully_shard(layer, mesh=wide, shard_placement_fn=place, reshard_after_forward=after)
    fully_shard(model, mesh=wide)
    assert len(model[0]._get_fsdp_state().groups) == 2
    assert model[0].experts.device_mesh == grid
    assert model[0].experts.placements == (Replicate(), Shard(0 if kind == "ours_dim0" else 1))
    assert model[0].out.weight.placements == (Shard(0),)
    assert_equal_training(fed_own_chunk(model, inputs()), fed_whole(reference, inputs()))
    if after == 2:
        model(inputs()[0].requires_grad_())
        assert isinstance(model[0].experts, DTensor)  # over two ranks already: resharded as if True
        assert model[0].experts.device_mesh == grid
        assert model[0].out.weight.device_mesh.size(-1) == 2


@needs_torch("2.12", "ShardPlacementResult")
@on_ranks(4)
def test_experts_that_are_cut_over_ep_and_sharded_over_the_ranks_that_share_them():
    """Expert parallelism: a DTensor on ep beside its own data-parallel mesh, plain parameters over all ranks; as in torch."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult as TorchResult

    world = cpu_mesh(2, 2, names=("edp", "ep"))
    everyone = world._flatten("edp_ep")
    models = []
    for apply, result in (
        (fully_shard, ShardPlacementResult(Shard(1), world["edp"])),
        (torch_fully_shard, TorchResult(Shard(1), FSDPMeshInfo(world["edp"], shard_mesh_dim=0))),
    ):
        torch.manual_seed(0)
        model = ParallelExperts()
        model.experts = nn.Parameter(distribute_tensor(model.experts, world["ep"], [Shard(0)]))
        apply(model, mesh=everyone, shard_placement_fn=lambda p, r=result: r if p.ndim == 3 else None)
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))).backward()
        models.append(model)
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert ours.placements == theirs.placements, name
        assert ours.device_mesh == theirs.device_mesh, name
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local(), msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
def test_one_process_group_and_several_dtypes_make_one_group_each():
    model = moe()
    model[0].gate.to(torch.float64)
    mesh = cpu_mesh()
    fully_shard(model[0], mesh=mesh, shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), mesh) if p.ndim == 1 else None)
    assert sorted(len(group.params) for group in model[0]._get_fsdp_state().groups) == [2, 3]


@on_ranks(4)
def test_mixed_precision_and_accumulation_over_two_meshes():
    model, reference = with_reference(moe())
    grid = cpu_mesh(2, 2, names=("edp", "ep"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(
        model,
        mesh=cpu_mesh(4, names=("dp",)),
        shard_placement_fn=lambda p: ShardPlacementResult(None, grid["ep"]) if p.ndim == 3 else None,
        mp_policy=policy,
    )
    rank = torch.distributed.get_rank()
    for step, x in enumerate(inputs()):
        model.set_requires_gradient_sync(step == 2)
        model(x.chunk(4)[rank]).square().mean().backward()
        reference(x).square().mean().backward()
    assert model[0].gate.weight.grad.dtype == torch.float32
    torch.testing.assert_close(model[0].gate.weight.grad.full_tensor(), reference[0].gate.weight.grad, atol=0.05, rtol=0.05)
