"""Side by side with torch's own FSDP2: the same bits where the order of reduction is the same, a few ulps elsewhere.

Between two ranks there is one order of addition, and halving is exact; one rank adds nothing. gloo's ring adds in another order
than ours at 3 and 4 ranks.
"""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.distributed.fsdp as upstream
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fsdp2
from harness import cpu_mesh, device_type, on_ranks
from harness.mesh import moved_to
from harness.models import Block, batches, mlp, token_batches, transformer
from harness.training import (
    adamw,
    adamw_foreach,
    assert_equal_training,
    assert_same_bits,
    fed_own_chunk,
    forward_backward,
    micro_batches,
    own_chunk,
    sgd,
)


def shard(api: types.ModuleType, model: nn.Module, mesh=None, **options) -> nn.Module:
    moved_to(device_type(), model)  # where torch's does not take it from the CPU
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh or cpu_mesh(), **options)
    return api.fully_shard(model, mesh=mesh or cpu_mesh(), **options)


def both(model: nn.Module, inputs: list[Tensor], optimizer=sgd, iteration=forward_backward, mesh=None, **options):
    """The training of ``model`` by us and by torch, and what ``iteration`` is told: which of them it is."""
    steps = []
    for api in (fsdp2, upstream):
        mine = copy.deepcopy(model)
        policy = options.get("mp_policy")
        if policy is not None:
            policy = api.MixedPrecisionPolicy(**policy)
        shard(api, mine, mesh, **{**options, **({"mp_policy": policy} if policy is not None else {})})
        steps.append(fed_own_chunk(mine, inputs, optimizer, iteration))
    return steps


def check(world_size: int, ours, theirs, ulps: float = 16) -> None:
    if world_size <= 2:
        assert_same_bits(ours, theirs)
    else:
        assert_equal_training(ours, theirs, ulps=ulps)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("optimizer", "after"), [(sgd, True), (sgd, False), (adamw, False), (adamw_foreach, True)])
def test_an_mlp(optimizer, after, world_size):
    ours, theirs = both(mlp(), batches(4), optimizer, reshard_after_forward=after)
    check(world_size, ours, theirs, ulps=16 if optimizer is sgd else 64)  # Adam magnifies what small gradients differ by


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("tied", [False, True])
def test_a_transformer(tied, world_size):
    check(world_size, *both(transformer(tied), token_batches(4)), ulps=32)


@on_ranks(2)
def test_a_transformer_under_adam():
    ours, theirs = both(transformer(), token_batches(4), adamw)
    assert_same_bits(ours, theirs)


@on_ranks(2, 4)
def test_a_cut_along_the_last_dim_that_divides(world_size):
    # Upstream does not cut dims other than the first unevenly.
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % world_size == 0 else None

    ours, theirs = both(mlp(dim=12), batches(), shard_placement_fn=placement)
    assert [param.placements for param in ours[0].params.values()] == [param.placements for param in theirs[0].params.values()]
    check(world_size, ours, theirs)


@on_ranks(4)
@pytest.mark.parametrize("after", [True, 2])
def test_a_mesh_of_two_by_two(after):
    mesh = cpu_mesh(2, 2) if after is True else cpu_mesh()
    check(4, *both(mlp(), batches(), mesh=mesh, reshard_after_forward=after))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("sync_each", [True, False])
def test_micro_batches(sync_each, world_size):
    syncs = [0, 1] if sync_each else [1]
    iteration = micro_batches(2, set_requires_gradient_sync=syncs, set_is_last_backward=[1], set_reshard_after_backward=[1])
    check(world_size, *both(mlp(), batches(), iteration=iteration))


@on_ranks(4)
def test_micro_batches_that_are_all_reduced_at_the_last():
    iteration = micro_batches(3, set_requires_all_reduce=[2])
    check(4, *both(mlp(), batches(shape=(36, 7)), iteration=iteration, mesh=cpu_mesh(2, 2)))


@on_ranks(1, 2)
def test_torch_gives_its_own_class_to_a_module_whose_class_we_had_before():
    """Its fully_shard found our class in its own map of classes, and its modules had our methods without our state."""
    ours = fsdp2.fully_shard(mlp(), mesh=cpu_mesh())
    theirs = upstream.fully_shard(mlp(), mesh=cpu_mesh())
    assert not isinstance(theirs, fsdp2.FSDPModule)
    theirs.set_requires_gradient_sync(True)
    assert isinstance(ours, fsdp2.FSDPModule)


MIXED = {
    "bf16 reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
    "fp32 reduced in bf16": {"reduce_dtype": torch.bfloat16},
    "fp16": {"param_dtype": torch.float16},
    "fp16 reduced in fp32": {"param_dtype": torch.float16, "reduce_dtype": torch.float32},
}


@on_ranks(1, 2)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("policy", MIXED)
def test_mixed_precision(policy, accumulate):
    iteration = micro_batches(2, set_requires_gradient_sync=[1] if accumulate else [0, 1])
    assert_same_bits(*both(mlp(), batches(), adamw, iteration, mp_policy=MIXED[policy]))


class CastsBetween(nn.Module):
    """Blocks whose outputs are fp32 again, for a residual stream that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float()
        for block in self.blocks:
            output = block(x)
            assert output.dtype == torch.float32
            x = x + output
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16])
def test_outputs_cast_to_output_dtype(param_dtype):
    policy = {"param_dtype": param_dtype, "reduce_dtype": torch.float32, "output_dtype": torch.float32}
    torch.manual_seed(0)
    ours, theirs = both(CastsBetween(), batches(), mp_policy=policy)
    assert ours[0].loss.dtype == torch.float32
    assert_same_bits(ours, theirs)


@on_ranks(2)
def test_inputs_that_are_not_cast():
    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        return forward_backward(model, x.bfloat16()).float()

    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    assert_same_bits(*both(mlp(), batches(), iteration=iteration, mp_policy=policy))


@on_ranks(2)
def test_inputs_that_are_not_cast_and_do_not_fit_are_the_users_error_in_both():
    for api in (fsdp2, upstream):
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        model = api.fully_shard(nn.Linear(7, 5), mesh=cpu_mesh(), mp_policy=policy)
        with pytest.raises(RuntimeError, match="dtype"):
            model(own_chunk(batches()[0]))
        if api is fsdp2:
            model.reset_iter_state()


@on_ranks(2)
def test_gradient_divide_factor_and_sums():
    results = []
    for api in (fsdp2, upstream):
        model = shard(api, mlp())
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
        results.append(fed_own_chunk(model, batches()))
    assert_equal_training(*results)


@on_ranks(2)
def test_an_all_reduce_hook_sees_the_same_gradients():
    seen: dict[str, list[float]] = {}
    for api in (fsdp2, upstream):
        model = shard(api, mlp())
        norms = seen.setdefault(api.__name__, [])
        for module in (model, *model.blocks):
            module.set_all_reduce_hook(lambda output, norms=norms: norms.append(output.double().square().sum().item()))
        fed_own_chunk(model, batches())
    assert len(seen["fsdp2"]) == len(seen[upstream.__name__]) == 4 * 3
    for ours, theirs in zip(seen["fsdp2"], seen[upstream.__name__], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@on_ranks(2)
def test_clipping_gradients_by_their_norm():
    def iteration(model: nn.Module, x: Tensor) -> Tensor:
        loss = forward_backward(model, x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    assert_same_bits(*both(mlp(), batches(), adamw, iteration))
