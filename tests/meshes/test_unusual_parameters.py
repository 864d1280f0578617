"""Parameters that torch's FSDP2 refuses: several dtypes in a group, 0-d, transposed, channels-last, sliced, expanded."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, on_ranks
from harness.sharding import with_reference
from harness.training import adamw_foreach, assert_trains_bitwise_as, forced, sgd_foreach


class Odd(nn.Module):
    """(batch, 3, 5, 5) images through one parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1).to(memory_format=torch.channels_last)
        self.temperature = nn.Parameter(torch.tensor(1.3))  # 0-d
        self.transposed = nn.Parameter(torch.randn(5, 7).t() / 3)  # (7, 5), strides (1, 7)
        self.permuted = nn.Parameter(torch.randn(3, 5, 4).permute(1, 2, 0) / 3)  # (5, 4, 3)
        self.sliced = nn.Parameter(torch.randn(5, 8)[:, 1::2] / 3)  # (5, 4), with holes
        self.expanded = nn.Parameter(torch.randn(1, 4).expand(3, 4) / 3)  # (3, 4), one row in memory
        self.wide = nn.Linear(3, 6).double()
        self.count = nn.Parameter(torch.tensor([3, 1]), requires_grad=False)  # integers

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).mean((2, 3)) * self.temperature
        x = torch.tanh(x @ self.transposed)
        x = torch.einsum("bi,ijk->bjk", x, self.permuted) + (x @ self.sliced).unsqueeze(-1)
        x = (x.transpose(1, 2) * self.expanded).sum(-1)
        return self.wide(x.to(self.wide.weight.dtype)).float() * self.count[0]


def odd(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def images(num_steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, 3, 5, 5, generator=generator) for _ in range(num_steps)]


def trainable(params: object) -> list[nn.Parameter]:
    return [param for param in params if param.requires_grad]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("gather", ["packed", *(pytest.param(gather, marks=pytest.mark.slow) for gather in ("direct", "mixed"))])
@pytest.mark.parametrize("optimizer", [sgd_foreach, pytest.param(adamw_foreach, marks=pytest.mark.slow)])
def test_training_equals_the_unsharded_model(optimizer, gather):
    model, reference = with_reference(odd())
    with forced(gather=gather):
        fully_shard(model, mesh=cpu_mesh())
    assert_trains_bitwise_as(model, reference, images(), optimizer)


@on_ranks(3)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dim_of_permuted_parameters_can_be_cut(dim):
    model, reference = with_reference(odd())

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if param.ndim > 1 else None

    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=place)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    assert_trains_bitwise_as(model, reference, images())


@on_ranks(3)
@pytest.mark.parametrize("after", [None, True])
def test_what_the_user_sees(after):
    reference, model = odd(), odd()
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after)
    for (name, ours), theirs in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert isinstance(ours, DTensor), name
        assert ours.dtype == theirs[1].dtype
        assert ours.shape == theirs[1].shape
        assert ours.placements == ((Replicate(),) if ours.ndim == 0 else (Shard(0),)), name
        assert ours.requires_grad == theirs[1].requires_grad

    def check(module: nn.Module, args: object) -> None:
        for name, theirs in reference.named_parameters():
            seen = module.get_parameter(name)
            assert type(seen) is nn.Parameter, name
            assert torch.equal(seen, theirs), name
            if name not in ("sliced", "expanded"):  # those become contiguous: nobody can gather into holes
                assert seen.stride() == theirs.stride(), name

    model.register_forward_pre_hook(check)
    model(images()[0])


@on_ranks(3)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trips_and_saves_its_own_bytes(assign):
    source, target = odd(seed=1), odd(seed=2)
    reference = copy.deepcopy(source)
    for model in (source, target):
        fully_shard(model, mesh=cpu_mesh())
        model(images()[0]).sum().backward()
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    with torch.serialization.safe_globals([]):
        state = torch.load(file, weights_only=False)
    target.load_state_dict(state, assign=assign)
    for (name, ours), theirs in zip(target.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    x = images()[0]
    torch.testing.assert_close(target(x), reference(x))


@on_ranks(2, 3)
def test_optimizer_state_is_shaped_like_the_shards():
    model = odd()
    fully_shard(model, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(trainable(model.parameters()))
    model(images()[0].chunk(dist.get_world_size())[dist.get_rank()]).sum().backward()
    optimizer.step()
    for param in trainable(model.parameters()):
        assert optimizer.state[param]["exp_avg"].placements == param.placements
        assert optimizer.state[param]["exp_avg"].to_local().shape == param.to_local().shape


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_mixed_precision_casts_floating_point_parameters_of_every_dtype_and_leaves_integers(offload):
    model, reference = with_reference(odd())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload_policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy, **offload_policy)
    seen = {}
    model.register_forward_pre_hook(lambda module, args: seen.update(module.named_parameters()))
    x = images()[0]
    model(x.chunk(2)[dist.get_rank()]).square().mean().backward()
    reference(x).square().mean().backward()
    for name, theirs in reference.named_parameters():
        assert seen[name].dtype == (torch.bfloat16 if theirs.is_floating_point() else torch.int64), name
        ours = model.get_parameter(name)
        assert ours.dtype == theirs.dtype
        if theirs.requires_grad:
            assert ours.grad.dtype == theirs.dtype
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, atol=0.1, rtol=0.1, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
def test_resharding_to_fewer_ranks():
    model, reference = with_reference(odd(), fully_shard, mesh=cpu_mesh(), reshard_after_forward=2)
    model(images()[0])
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.device_mesh.size(-1) == 2
        assert torch.equal(ours.full_tensor(), theirs), name
    model.reset_iter_state()
    assert_trains_bitwise_as(model, reference, images())


@on_ranks(4)
def test_hybrid_sharding_and_accumulation():
    model, reference = with_reference(odd(), fully_shard, mesh=cpu_mesh(2, 2))
    for step, x in enumerate(images()):
        model.set_requires_gradient_sync(step == 2)
        model(x.chunk(4)[dist.get_rank()]).square().mean().backward()
        reference(x).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moving_the_module_to_another_dtype(dtype):
    model, reference = with_reference(odd(), fully_shard, mesh=cpu_mesh())
    model(images()[0]).sum().backward()
    model.zero_grad()
    model.to(dtype)
    reference.to(dtype)
    x = images()[0].to(dtype)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.full_tensor(), theirs), name
    torch.testing.assert_close(model(x), reference(x))


@on_ranks(3)
def test_a_single_zero_dim_parameter_is_a_group_of_its_own():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = Scale()
    fully_shard(model, mesh=cpu_mesh())
    model(torch.tensor(float(dist.get_rank()))).backward()
    assert model.scale.grad.full_tensor() == 1.0
    assert model.scale.grad.placements == (Replicate(),)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert model(torch.tensor(1.0)).item() == 1.0
