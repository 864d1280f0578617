"""Experts on a mesh of their own, sequences that ranks share: the certificate names parameters whose gradient is scaled wrongly.

The oracle is the unsharded model on all tokens: a parameter's gradient is as many times the right one as the certificate says.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import doctor, fully_shard
from harness import cpu_mesh, on_ranks

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"
Step = Callable[[Any], object]


def example(name: str) -> Any:
    sys.path.insert(0, str(CLIENTS))
    try:
        spec = importlib.util.spec_from_file_location(name, CLIENTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(CLIENTS))


def times_the_right_gradient(model: nn.Module, step: Step, right: dict[str, Tensor]) -> dict[str, float]:
    """By how much each gradient of a step is larger than that of the unsharded model, which it must be a multiple of."""
    step(lambda losses: losses)
    found = {}
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        grad, expected = param.grad.full_tensor(), right[name]
        found[name] = ((grad * expected).sum() / expected.square().sum()).item()
        torch.testing.assert_close(grad, found[name] * expected, rtol=1e-3, atol=1e-6)
    model.zero_grad()
    return found


def check(model: nn.Module, step: Step, right: dict[str, Tensor], num_tokens: int, wrong: dict[str, float]) -> None:
    """The certificate names exactly the parameters of ``wrong``, with their divisors, as the unsharded model shows them."""
    certificate = doctor.gradient_scales(model, step)
    named = {name for finding in certificate.report for name in finding.params}
    assert named == set(wrong), certificate.report
    assert {finding.check for finding in certificate.report} <= {"gradient-scale"}
    expected = {name: wrong.get(name, num_tokens) for name in certificate.divisors}
    assert certificate.divisors == pytest.approx(expected, rel=1e-3)
    scales = {name: num_tokens / divisor for name, divisor in expected.items()}
    assert times_the_right_gradient(model, step, right) == pytest.approx(scales, rel=1e-3)


def gradients(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    """Of the mean, and of what is not sharded."""
    losses.mean().backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.slow
@on_ranks(4)
def test_experts_whose_reduction_divides_by_their_own_mesh_are_named_and_no_other_parameter_is():
    """Two experts a rank, on two ranks of a mesh that all four send tokens to."""
    program = example("experts")

    def built() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(program.Mixture(), program.Mixture())

    def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
        return (model(tokens) - tokens.roll(1, dims=1)).square().mean(1)

    x = torch.randn(64, program.WIDTH, generator=torch.Generator().manual_seed(5))
    right = gradients(whole := built(), token_losses(whole, x))
    here = slice(2 * (dist.get_rank() % 2), 2 * (dist.get_rank() % 2) + 2)
    right = {name: grad[here] if ".experts." in name else grad for name, grad in right.items()}
    model = built()
    program.shard(model, "cpu")

    def step(probe: Any) -> None:
        probe(token_losses(model, x.chunk(4)[dist.get_rank()])).mean().backward()

    check(model, step, right, 64, {})
    model[1].experts.set_gradient_divide_factor(None)
    check(model, step, right, 64, {"1.experts.up": 32, "1.experts.down": 32})
    model[0].experts.set_gradient_divide_factor(8)
    check(model, step, right, 64, {"1.experts.up": 32, "1.experts.down": 32, "0.experts.up": 128, "0.experts.down": 128})


class GatherSequence(torch.autograd.Function):
    """Concatenates the parts of a sequence that ranks have; each rank gets the sum of the gradients of its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Causal, over sequences of which each rank of ``group`` has a part; keys and values travel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # a bias would have no gradient but rounding
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        begin = 0
        if self.group is not None:
            begin = self.group.rank() * x.shape[1]
            key, value = GatherSequence.apply(key, self.group), GatherSequence.apply(value, self.group)
        may_see = torch.arange(begin, begin + x.shape[1])[:, None] >= torch.arange(key.shape[1])
        return x + nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=may_see)


@pytest.mark.slow
@on_ranks(4)
def test_attention_whose_divisor_leaves_out_context_parallel_ranks_is_named_and_no_other_parameter_is():
    """Two ranks share each sequence, two have other sequences: gradients are averaged over all four."""
    rows, length, width = 4, 6, 8
    meshes, everyone = cpu_mesh(2, 2, names=("dp", "cp")), cpu_mesh()
    x = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(5))
    part = slice(3 * meshes["cp"].get_local_rank(), 3 * meshes["cp"].get_local_rank() + 3)

    def built() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Attention(width), nn.Linear(width, width), Attention(width))

    def sharded(mesh_of_last: Any = everyone) -> Any:
        model = built()
        for layer, mesh in ((model[0], everyone), (model[2], mesh_of_last)):
            layer.group = meshes["cp"].get_group()
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=everyone)

    def step_of(model: nn.Module, weight: float = 1.0) -> Step:
        own = x.chunk(2)[meshes["dp"].get_local_rank()]

        def step(probe: Any) -> None:
            losses = (model(own[:, part]) - own.roll(1, dims=2)[:, part]).square().mean(2)
            (probe(losses).mean() * weight).backward()

        return step

    right = gradients(whole := built(), (whole(x) - x.roll(1, dims=2)).square().mean(2))
    names = list(right)
    of_last = [name for name in names if name.startswith("2.")]
    model = sharded()
    check(model, step_of(model), right, 24, {})
    check(model, step_of(model, weight=0.5), right, 24, dict.fromkeys(names, 48))  # divided by the whole sequence's tokens
    model[2].set_gradient_divide_factor(2)  # by the data-parallel ranks alone
    check(model, step_of(model), right, 24, dict.fromkeys(of_last, 12))

    model = sharded(meshes["dp"])  # and never summed over the ranks of a sequence
    (finding,) = doctor.gradient_scales(model, step_of(model)).report
    assert sorted(finding.params) == sorted(of_last)
