"""``fsdp2.reference`` trains as fsdp2 and as torch's FSDP2 do, setting by setting: losses, gradients and parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import MixedPrecisionPolicy, ShardPlacementResult, reference
from harness import on_ranks
from harness.models import MLP

Shards = Callable[..., Any]
BF16 = torch.bfloat16
NUM_STEPS, NUM_MICRO_BATCHES = 2, 2


def by_blocks(shard: Shards, model: Any, **options: Any) -> None:
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)


def nothing(model: Any, index: int) -> None: ...


def sync_last(model: Any, index: int) -> None:
    model.set_requires_gradient_sync(index == NUM_MICRO_BATCHES - 1)


@dataclass
class Setting:
    """How a model is sharded, and what happens before each micro-batch."""

    shard: Callable[[Shards, Any], None] = by_blocks
    before: Callable[[Any, int], None] = nothing
    make: Callable[[], nn.Module] = MLP
    x: Callable[[Tensor], Any] = field(default=lambda x: x)
    upstream: bool = True  # whether torch's FSDP2 means the same
    tolerance: float = 1e-6


def options(**given: Any) -> Callable[[Shards, Any], None]:
    return lambda shard, model: by_blocks(shard, model, **given)


def policy(**given: Any) -> Setting:
    return Setting(lambda shard, model: by_blocks(shard, model, mp_policy=MixedPrecisionPolicy(**given)), tolerance=2e-2)


def mesh(*shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


class Optional(nn.Module):
    """The branch of odd ranks, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.odd, self.never = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.odd(x) if dist.get_rank() % 2 else self.always(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()))


def frozen() -> nn.Module:
    model = MLP()
    model.blocks[1].requires_grad_(False)
    return model


def different_on_ranks() -> nn.Module:
    torch.manual_seed(100 + dist.get_rank())
    return MLP()


def ignored(shard: Shards, model: Any) -> None:
    by_blocks(shard, model, ignored_params={model.first.weight})


def last_two_together(shard: Shards, model: Any) -> None:
    shard(model.blocks[0])
    shard([model.blocks[1], model.blocks[2]])
    shard(model)


def fp32_outputs(shard: Shards, model: Any) -> None:
    for block in model.blocks:
        shard(block, mp_policy=MixedPrecisionPolicy(BF16))
    shard(model, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=torch.float32))


def divided_by_three(shard: Shards, model: Any) -> None:
    by_blocks(shard, model)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)  # torch's would ask gloo for what it does not have


def zeros_for_unused(shard: Shards, model: Any) -> None:
    shard(model)
    model.set_reduce_scatter_unused_params(True)


def experts_elsewhere(shard: Shards, model: Any) -> None:
    """Blocks go over pairs of ranks, the rest over all."""
    pairs = mesh(2, 2)["shard"]
    by_blocks(shard, model, shard_placement_fn=lambda param: ShardPlacementResult(None, pairs) if param.ndim == 1 else None)


def tensor_parallel(shard: Shards, model: Any) -> None:
    axes = mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, axes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    by_blocks(shard, model, mesh=axes["dp"])


SETTINGS = {
    "fp32": Setting(),
    "one group": Setting(lambda shard, model: shard(model)),
    "a list of modules": Setting(last_two_together),
    "bf16": policy(param_dtype=BF16),
    "bf16, reduced in fp32": policy(param_dtype=BF16, reduce_dtype=torch.float32),
    "fp32, reduced in bf16": policy(reduce_dtype=BF16),
    "fp32 outputs": Setting(fp32_outputs, tolerance=2e-2),
    "inputs as they are": policy(param_dtype=torch.float32, cast_forward_inputs=False),
    "fp64 parameters": Setting(make=lambda: MLP().double(), x=lambda x: x.double()),
    "accumulated": Setting(before=sync_last),
    "accumulated in bf16, reduced in fp32": Setting(
        options(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)), before=sync_last, tolerance=2e-2
    ),
    "divided by three": Setting(divided_by_three),
    "frozen": Setting(make=frozen),
    "ignored": Setting(ignored),
    "kept unsharded": Setting(options(reshard_after_forward=False)),
    "other values on each rank": Setting(make=different_on_ranks),
    "cut along columns": Setting(
        options(shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None), make=different_on_ranks, upstream=False
    ),  # torch's refuses columns that do not divide
    "unused on some ranks": Setting(lambda shard, model: shard(model), make=Optional, upstream=False),
    "unused, filled with zeros": Setting(zeros_for_unused, make=Optional, upstream=False),
    "tied": Setting(lambda shard, model: shard(model), make=Tied),
}
ON_FOUR = {
    "hsdp": Setting(lambda shard, model: by_blocks(shard, model, mesh=mesh(2, 2))),
    "hsdp, accumulated": Setting(lambda shard, model: by_blocks(shard, model, mesh=mesh(2, 2)), before=sync_last),
    "hsdp, other values on each rank of a node": Setting(
        lambda shard, model: by_blocks(shard, model, mesh=mesh(2, 2)),
        make=lambda: (torch.manual_seed(dist.get_rank() % 2), MLP())[1],
    ),
    "one axis of two": Setting(lambda shard, model: by_blocks(shard, model, mesh=mesh(2, 2)["shard"])),
    "parameters over other ranks": Setting(experts_elsewhere, upstream=False),
    "tensor parallel": Setting(tensor_parallel, make=lambda: MLP(dim=13)),
}


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor if tensor is None else tensor.detach().clone()


def trained(setting: Setting, shard: Shards) -> list[Any]:
    torch.manual_seed(0)
    model: Any = setting.make()
    setting.shard(shard, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    generator = torch.Generator().manual_seed(7 + (0 if setting.shard is tensor_parallel else dist.get_rank()))
    told: list[Any] = []
    for _ in range(NUM_STEPS):
        for index in range(NUM_MICRO_BATCHES):
            setting.before(model, index)
            loss = model(setting.x(torch.randn(4, 7, generator=generator))).float().square().mean()
            loss.backward()
            told.append(loss.detach())
            told += [whole(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        told += [whole(param) for param in model.parameters()]
    return told


def compare(setting: Setting) -> None:
    ours = trained(setting, reference.fully_shard)
    others = [fsdp2.fully_shard, *([torch_fsdp.fully_shard] if setting.upstream else [])]
    for other in others:
        theirs = trained(setting, other)
        assert [each is None for each in ours] == [each is None for each in theirs]
        for a, b in zip(ours, theirs, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b.to(a.dtype), rtol=setting.tolerance, atol=setting.tolerance)


def compare_all(settings: dict[str, Setting]) -> None:
    for name, setting in settings.items():
        try:
            compare(setting)
        except Exception as error:
            raise AssertionError(name) from error


@on_ranks(2)
def test_each_setting_means_what_it_does_when_sharded():
    compare_all(SETTINGS)


@pytest.mark.slow
@on_ranks(4)
def test_each_mesh_means_what_it_does_when_sharded():
    compare_all(ON_FOUR)


@on_ranks(2)
def test_computing_in_fp64_tells_rounding_from_faults():
    """In fp64 the policy's bf16 has no effect: the run is that in fp32, and not the one in bf16."""
    setting = SETTINGS["bf16"]
    with mock.patch.object(reference, "compute_dtype", torch.float64):
        exact = trained(setting, reference.fully_shard)
    in_fp32 = trained(SETTINGS["fp32"], reference.fully_shard)
    for a, b in zip(exact, in_fp32, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-4)
    assert any(a is not None and not torch.equal(a, b) for a, b in zip(exact, trained(setting, reference.fully_shard), strict=True))


def test_the_reference_is_read_in_five_minutes():
    assert len(Path(reference.__file__).read_text().splitlines()) <= 200


def losses_and_gradients(shard: Shards, calls: Callable[[Any], None]) -> list[Tensor | None]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3)
    shard(model)
    calls(model)
    return [whole(param.grad) for param in model.parameters()]


def backward(model: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()


def switched_off_all_reduce(model: Any) -> None:
    model.set_requires_all_reduce(False)  # no replicas: no effect
    backward(model)


def off_and_on_by_another_name(model: Any) -> None:
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    model.set_requires_all_reduce(True)
    backward(model)


def dropped_by_zero_grad(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    backward(model)
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    backward(model)


def not_zeroed(model: Any) -> None:
    backward(model)
    backward(model)


def in_a_copy(model: Any) -> None:
    teacher = copy.deepcopy(model)
    teacher.set_requires_gradient_sync(False)
    backward(model)
    teacher.requires_grad_(False)
    backward(model)
    backward(copy.deepcopy(model))


@on_ranks(2)
def test_switches_mean_what_they_do_when_sharded():
    for calls in (switched_off_all_reduce, off_and_on_by_another_name, dropped_by_zero_grad, not_zeroed, in_a_copy):
        ours, theirs = (losses_and_gradients(shard, calls) for shard in (reference.fully_shard, fsdp2.fully_shard))
        assert [each is None for each in ours] == [each is None for each in theirs], calls.__name__
        for a, b in zip(ours, theirs, strict=True):
            assert a is None or torch.equal(a, b), calls.__name__
