"""``ShardedGradScaler``: all ranks skip the same steps, and take the others as an unsharded model with torch's scaler does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from fsdp2.compat import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardedGradScaler, ShardingStrategy
from fsdp2.compat import FullyShardedDataParallel as FSDP
from harness import device_type, on_ranks
from harness.models import Block, batches, mlp
from harness.training import own_chunk


@on_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("offload", [False, True])
def test_scaled_training_is_that_of_the_unsharded_model(strategy: str, offload: bool) -> None:
    reference = mlp()
    model = FSDP(
        mlp(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload_params=offload),
    )
    scaler, plain = ShardedGradScaler(init_scale=8.0, growth_interval=2), GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for x in batches(5):
        for each, its, optimizer, rows in ((model, scaler, optimizers[0], own_chunk(x)), (reference, plain, optimizers[1], x)):
            optimizer.zero_grad()
            its.scale(each(rows).square().mean()).backward()
            its.unscale_(optimizer)
            its.step(optimizer)
            its.update()
    assert scaler.get_scale() == plain.get_scale() == 32.0
    for name, param in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor().cpu(), param.detach())


@on_ranks(3)
def test_infinity_on_one_rank_skips_the_step_on_all() -> None:
    model = FSDP(nn.Linear(3, 3, bias=False))
    scaler = ShardedGradScaler(init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.full_tensor()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    if dist.get_rank() == 2:  # the last rank's row alone
        model.weight.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight.full_tensor(), before)
    assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_ranks_without_a_piece_of_any_gradient_agree() -> None:
    model = FSDP(nn.Linear(1, 1, bias=False))
    scaler = ShardedGradScaler(init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.full((1, 1), float("nan"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_losses_keep_their_dtype_and_their_container() -> None:
    scaler = ShardedGradScaler(init_scale=2.0)
    losses = [torch.ones((), dtype=dtype, device=device_type()) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    scaled = scaler.scale(losses)
    assert [loss.dtype for loss in scaled] == [loss.dtype for loss in losses]
    assert all(loss == 2.0 for loss in scaled)
    assert type(scaler.scale(tuple(losses))) is tuple
    assert list(scaler.scale(iter(losses))) == scaled
    off = ShardedGradScaler(enabled=False)
    assert off.scale(losses) is losses


@on_ranks(2)
def test_fp16_gradients_are_unscaled() -> None:
    """FSDP1 with ``keep_low_precision_grads``; GradScaler refuses them."""
    policy = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)
    model = FSDP(nn.Linear(4, 4, bias=False), mixed_precision=policy)
    scaler = ShardedGradScaler(init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.dtype is torch.float16
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 4, dtype=torch.float16))
    scaler.step(optimizer)


@on_ranks(4)
def test_only_the_ranks_of_the_process_group_agree() -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    model = FSDP(nn.Linear(2, 2, bias=False), process_group=group)
    scaler = ShardedGradScaler(init_scale=4.0, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 2) * (float("inf") if dist.get_rank() == 3 else 1.0)
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if dist.get_rank() < 2 else 2.0)
