"""Models with torchao's float8 and NF4 weights train under fully_shard as they do unsharded."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from harness import cpu_mesh, on_ranks
from harness.models import batches
from harness.training import own_chunk

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'fsdp2[torchao]'")

OPTIONS = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "fp32 reduction": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 48, bias=False), nn.ReLU(), nn.Linear(48, 32, bias=False)
    )


def float8(fsdp: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(linears(), config=Float8LinearConfig(enable_fsdp_float8_all_gather=fsdp, emulate=True))


class Adapted(nn.Linear):
    """A frozen weight in 4 bits beside a low-rank adapter that is trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        from torchao.quantization.quantize_.workflows import to_nf4

        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 32, 1), requires_grad=False)
        self.a = nn.Parameter(torch.randn(4, linear.in_features) / 8)
        self.b = nn.Parameter(torch.randn(linear.out_features, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


def nf4(fsdp: bool) -> nn.Module:
    return nn.Sequential(*(Adapted(each) if isinstance(each, nn.Linear) else each for each in linears()))


def shard(model: nn.Module, **options) -> nn.Module:
    for module in model:
        if len(list(module.parameters())) > 0:
            fully_shard(module, mesh=cpu_mesh(), **options)
    return fully_shard(model, mesh=cpu_mesh(), **options)


def train(model: nn.Module, chunks, after_step=lambda model: None) -> list[dict[str, Tensor]]:
    """Losses and whole gradients of every step; ``chunks`` are what this process feeds of a batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    steps = []
    for x in batches(3, (12, 64)):
        losses, total = [], {}
        for chunk in chunks(x):
            loss = model(chunk).square().mean()
            loss.backward()
            losses.append(loss.detach())
            for name, param in model.named_parameters():
                if param.requires_grad:
                    total[name] = total.get(name, 0) + param.grad
            optimizer.zero_grad()
        for name, param in model.named_parameters():
            if name in total:
                param.grad = total[name] / len(losses)
        steps.append({"loss": torch.stack(losses).mean(), **{name: whole(grad) / len(losses) for name, grad in total.items()}})
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
    return steps


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def compare(make, after_step=lambda model: None, **options) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's
        model = shard(make(fsdp=True), **options)
        ours = train(model, lambda x: [own_chunk(x)], after_step)
        expected = train(make(fsdp=False), lambda x: x.chunk(dist.get_world_size()))
    for mine, theirs in zip(ours, expected, strict=True):
        dist.all_reduce(mine["loss"])
        mine["loss"] /= dist.get_world_size()
        assert mine.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    return model


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("options", OPTIONS)
def test_float8_weights_are_gathered_in_8_bits_and_trained(options):
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    model = compare(float8, **OPTIONS[options])
    for param in model.parameters():
        assert type(param._local_tensor) is WeightWithDynamicFloat8CastTensor


@on_ranks(2)
def test_float8_scales_may_be_computed_for_all_weights_at_once():
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    compare(float8, precompute_float8_dynamic_scale_for_fsdp)


@on_ranks(1, 2)
@pytest.mark.parametrize("options", OPTIONS)
def test_adapters_are_trained_beside_frozen_nf4_weights(options):
    model = compare(nf4, **OPTIONS[options])
    for name, param in model.named_parameters():
        assert (type(param._local_tensor).__name__ == "NF4Tensor") == name.endswith("weight")


@on_ranks(2)
def test_the_state_dict_of_nf4_weights_can_be_loaded():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, other = shard(nf4(True)), shard(nf4(True))
        with torch.no_grad():
            for param in other.parameters():
                if param.requires_grad:
                    param.zero_()
        other.load_state_dict(model.state_dict())
        (x,) = batches(1, (12, 64))
        torch.testing.assert_close(other(x), model(x), atol=0, rtol=0)
