"""``torch.func`` transforms and forward-mode AD through sharded modules, and backwards through their results.

torch's FSDP2 handles the transforms, but fails under ``torch.autograd.forward_ad`` and in a backward through ``torch.func.grad``.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from fsdp2 import fully_shard
from harness import cpu_mesh, on_ranks
from harness.sharding import with_reference
from harness.training import assert_equal_grads, assert_trains_bitwise_as, grads_of


def make(after: bool | None) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 3)
    model, reference = with_reference(nn.Sequential(*layers))
    fully_shard(model[2], mesh=cpu_mesh(), reshard_after_forward=after)
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=after)
    return model, reference


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
T = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def dual(model: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, T))).tangent


def loss_of(model: nn.Module):
    return lambda x: model(x).square().sum()


TRANSFORMS = {
    "grad": lambda model: grad(loss_of(model))(X),
    "vjp": lambda model: vjp(model, X)[1](torch.ones(4, 3))[0],
    "jvp": lambda model: jvp(model, (X,), (T,))[1],
    "vmap": lambda model: vmap(model)(X),
    "jacrev": lambda model: jacrev(model)(X[0]),
    "jacfwd": lambda model: jacfwd(model)(X[0]),
    "hessian": lambda model: hessian(loss_of(model))(X[0]),
    "vmap of grad": lambda model: vmap(grad(loss_of(model)))(X),
    "jvp of grad": lambda model: jvp(grad(loss_of(model)), (X,), (T,))[1],
    "forward_ad": dual,
}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own use of it in forward-mode AD
DIFFERENTIABLE = ["grad", "vjp", "jvp", "vmap", "vmap of grad", "forward_ad"]


@on_ranks(1, 2)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_gives_what_it_gives_for_the_unsharded_model(transform, after):
    model, reference = make(after)
    torch.testing.assert_close(TRANSFORMS[transform](model), TRANSFORMS[transform](reference))
    assert all(param.grad is None for param in model.parameters())
    inputs = [X.repeat(3, 1)]
    assert_trains_bitwise_as(model, reference, inputs)
    torch.testing.assert_close(TRANSFORMS[transform](model), TRANSFORMS[transform](reference))


@on_ranks(2)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("transform", DIFFERENTIABLE)
def test_a_backward_through_the_result_of_a_transform(transform, after):
    model, reference = make(after)
    for _ in range(2):
        TRANSFORMS[transform](model).square().sum().backward()
        TRANSFORMS[transform](reference).square().sum().backward()
        assert_equal_grads(grads_of(model), grads_of(reference), ulps=64)
